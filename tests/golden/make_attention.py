"""Writes attention.safetensors: attention by PyTorch, for tests/test_attention.c.

    python tests/golden/make_attention.py

Case CASE has the tensors CASE.q, CASE.k, CASE.v, CASE.dout, CASE.out, CASE.dq, CASE.dk, CASE.dv, all [batch, tokens,
heads, head_dim]. It has CASE.bias and CASE.dbias with a bias, and CASE.mask (0: hidden) with a boolean mask. Each case
without a soft cap is one call of torch.nn.functional.scaled_dot_product_attention, whose attn_mask holds the window,
the documents, ALiBi and the bias, or the mask. Cases with a soft cap are written out. Computed in float64 from float32
inputs. Created with PyTorch 2.15.0.
"""

import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

BATCH, GROUPS, MEMBERS, DIM = 2, 2, 2, 4
HEADS = GROUPS * MEMBERS
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
DOCUMENTS = [0, 4, 10, 13, 20]  # of two sequences of 10 tokens
generator = torch.Generator().manual_seed(11)


def noise(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float32).double()


def positions(seq, kv_seq):
    """The position of each query and of each key; the last query and the last key have the same one."""
    return torch.arange(seq)[:, None] + kv_seq - seq, torch.arange(kv_seq)[None, :]


def visible(seq, kv_seq, causal, window, documents):
    """Which keys a query may see: [batch, 1, seq, kv_seq]."""
    p, j = positions(seq, kv_seq)
    seen = (j <= p) if causal else torch.ones(seq, kv_seq, dtype=torch.bool)
    if window:
        seen = seen & ((p - j).abs() < window)
    seen = seen.expand(BATCH, 1, seq, kv_seq)
    if documents:
        number = torch.bucketize(torch.arange(BATCH * seq), torch.tensor(documents[1:]), right=True).view(BATCH, seq)
        seen = seen & (number[:, None, :, None] == number[:, None, None, :])
    return seen


def attention(q, k, v, changes, softcap):
    """q [batch, heads, seq, dim]; k and v have GROUPS heads. `changes` is added to the scores."""
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=changes, enable_gqa=True)
    k, v = k.repeat_interleave(MEMBERS, 1), v.repeat_interleave(MEMBERS, 1)
    scores = q @ k.transpose(-1, -2) / DIM ** 0.5
    return torch.softmax(softcap * torch.tanh(scores / softcap) + changes, -1) @ v


def case(seq, kv_seq, causal, window=0, softcap=0.0, alibi=False, documents=None, bias_shape=None, mask_shape=None):
    q, k, v = noise(BATCH, seq, HEADS, DIM), noise(BATCH, kv_seq, GROUPS, DIM), noise(BATCH, kv_seq, GROUPS, DIM)
    dout, values = noise(BATCH, seq, HEADS, DIM), [q, k, v]
    if bias_shape:
        values.append(noise(*bias_shape, seq, kv_seq))
    values = [x.requires_grad_() for x in values]
    p, j = positions(seq, kv_seq)
    changes = torch.zeros(BATCH, HEADS, seq, kv_seq, dtype=torch.float64)
    if alibi:
        changes = changes - SLOPES[None, :, None, None] * (p - j).abs()
    if bias_shape:
        changes = changes + values[3]
    changes = changes.masked_fill(~visible(seq, kv_seq, causal, window, documents), float("-inf"))
    if mask_shape:
        mask = (noise(*mask_shape, seq, kv_seq) > -0.5) | torch.eye(seq, kv_seq, dtype=torch.bool)
        changes = mask & visible(seq, kv_seq, causal, window, documents)  # boolean: PyTorch hides where it is False
    out = attention(*[x.transpose(1, 2) for x in values[:3]], changes, softcap).transpose(1, 2)
    grads = torch.autograd.grad((out * dout).sum(), values)
    names = ["q", "k", "v", "bias"][:len(values)]
    result = {**dict(zip(names, values)), "out": out, "dout": dout}
    if mask_shape:
        result["mask"] = mask
    return {**result, **{"d" + name: grad for name, grad in zip(names, grads)}}


cases = {
    "cross": case(5, 9, False),
    "later": case(3, 9, True),
    "window": case(10, 10, True, window=4),
    "local": case(10, 10, False, window=3),
    "softcap": case(10, 10, True, softcap=2.0),
    "alibi": case(10, 10, True, alibi=True),
    "documents": case(10, 10, True, documents=DOCUMENTS),
    "bias": case(10, 10, False, bias_shape=(1, HEADS)),
    "together": case(10, 10, True, window=6, softcap=3.0, alibi=True, documents=DOCUMENTS, bias_shape=(BATCH, 1)),
    "mask": case(10, 10, True, mask_shape=(BATCH, HEADS)),
}
tensors = {f"{name}.{key}": x.detach().float().contiguous() for name, one in cases.items() for key, x in one.items()}
save_file(tensors, os.path.join(os.path.dirname(os.path.abspath(__file__)), "attention.safetensors"))
