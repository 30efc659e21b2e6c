"""Writes cross_attention.safetensors: cross-attention by PyTorch, for tests/test_cross_attention.c.

    python tests/golden/make_cross_attention.py

Case CASE has the tensors CASE.x and CASE.dy [queries, hidden], CASE.memory [keys, kv_hidden], the parameters of
mt_cross_attention as CASE.query.weight, CASE.key.bias, ..., the output CASE.y, and the gradients CASE.grad.x,
CASE.grad.memory, CASE.grad.query.weight, ... The case `biased` also has a bias of the scores of each sequence and head,
biased.bias [sequences * heads * queries, keys], and its gradient. Each case is one call of
torch.nn.MultiheadAttention with kdim and vdim. Where key/value heads are shared, it gets the rows of each one once for
every query head that shares it. Computed in float64 from float32 inputs. Created with PyTorch 2.15.0.
"""

import os

import torch
from safetensors.torch import save_file
from torch.func import functional_call

SEQUENCES, QUERIES, KEYS = 2, 6, 12
generator = torch.Generator().manual_seed(29)


def noise(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float32).double()


def parameters(hidden, heads, kv_heads, kv_hidden, bias):
    kv = hidden // heads * kv_heads
    shapes = {"query": (hidden, hidden), "key": (kv, kv_hidden), "value": (kv, kv_hidden),
              "linear_proj": (hidden, hidden)}
    result = {f"{name}.weight": noise(*shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    if bias:
        result.update({f"{name}.bias": noise(1, shape[0]) for name, shape in shapes.items()})
    return {name: p.float().double().requires_grad_() for name, p in result.items()}


def of_every_head(p, heads, kv_heads):
    """Repeats the rows of each key/value head for the query heads of its group."""
    head_dim = p.shape[0] // kv_heads
    return p.view(kv_heads, head_dim, -1).repeat_interleave(heads // kv_heads, 0).reshape(heads * head_dim, -1)


def pytorchs(p, heads, kv_heads, packed):
    """The parameters of torch.nn.MultiheadAttention. `packed`: it has one matrix when kdim and vdim are hidden."""
    every = {name: of_every_head(p[name + ".weight"], heads, kv_heads) for name in ("key", "value")}
    weights = [p["query.weight"], every["key"], every["value"]]
    if packed:
        result = {"in_proj_weight": torch.cat(weights)}
    else:
        result = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights))
    if "query.bias" in p:
        biases = [of_every_head(p[name + ".bias"].T, heads, kv_heads)[:, 0] for name in ("key", "value")]
        result.update(in_proj_bias=torch.cat([p["query.bias"][0]] + biases))
        result["out_proj.bias"] = p["linear_proj.bias"][0]
    result["out_proj.weight"] = p["linear_proj.weight"]
    return result


def case(hidden, heads, kv_heads, kv_hidden, bias, lengths, biased=False):
    p = parameters(hidden, heads, kv_heads, kv_hidden, bias)
    x = noise(SEQUENCES, QUERIES, hidden).requires_grad_()
    memory = noise(SEQUENCES, KEYS, kv_hidden).requires_grad_()
    dy = noise(SEQUENCES, QUERIES, hidden)
    layer = torch.nn.MultiheadAttention(hidden, heads, bias=bias, kdim=kv_hidden, vdim=kv_hidden, batch_first=True,
                                        dtype=torch.float64)
    padding = torch.arange(KEYS)[None, :] >= torch.tensor(lengths)[:, None]
    scores_bias = noise(SEQUENCES * heads, QUERIES, KEYS).requires_grad_() if biased else None
    y, _ = functional_call(layer, pytorchs(p, heads, kv_heads, kv_hidden == hidden), (x, memory, memory),
                           {"key_padding_mask": padding, "need_weights": False, "attn_mask": scores_bias}, strict=True)
    values = {"x": x, "memory": memory, **p}
    if biased:
        values["bias"] = scores_bias
    grads = torch.autograd.grad((y * dy).sum(), list(values.values()))
    return {**values, "dy": dy, "y": y, **{"grad." + name: grad for name, grad in zip(values, grads)}}


cases = {
    "plain": case(16, 4, 4, 16, True, [KEYS, KEYS]),
    "padded": case(16, 4, 4, 10, True, [7, 12]),
    "groups": case(24, 6, 3, 12, True, [12, 5]),
    "one": case(16, 8, 1, 24, False, [1, 12]),
    "biased": case(24, 6, 3, 12, True, [12, 5], biased=True),
}
tensors = {f"{name}.{key}": t.detach().reshape(-1, t.shape[-1]).float().contiguous()
           for name, one in cases.items() for key, t in one.items()}
save_file(tensors, os.path.join(os.path.dirname(os.path.abspath(__file__)), "cross_attention.safetensors"))
