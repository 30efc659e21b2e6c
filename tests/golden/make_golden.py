"""Writes the golden values for tests/test_golden.c, which compares megatron.h with plain PyTorch.

    python tests/golden/make_golden.py            writes NAME.bin beside this script, prints a table
    python tests/golden/make_golden.py --check    writes nothing; exit 1 if a file would change

Names of models after that, such as llama bert, restrict it to these.

Each model is implemented here with torch.nn.functional and autograd, and shares no code with the
library. It computes in float64 from parameters that are first rounded to float32, so the library
starts from exactly the same numbers. The reference's own rounding (1e-16) is negligible: every
difference is the library's. The table shows the errors of PyTorch itself in float32, for comparison.

Every weight, bias and norm gain is random, so the test detects an omitted bias, or a gain taken as 1.

The models, each with 4 sequences of 12 tokens:

    gpt2              pre-LN, LayerNorm, GELU (tanh), biases, learned positions, tied head, causal;
                      label smoothing, some targets ignored
    llama             pre-LN, RMSNorm with a large eps, SwiGLU, rotary positions, grouped queries,
                      no biases, untied head; its ffn of 34 is a multiple of neither 3 nor 4
    bert              post-LN, GELU (erf), bidirectional with key padding, tied head; 8 heads of
                      size 2; targets of the padding are ignored; some steps are not clipped
    residual_post_ln  one layer, residual connection taken after the norm; its ignore_index is -1
    window_packed     like llama, with a sliding window, a soft cap of the scores, and sequences that
                      are packed documents
    alibi_bias        like gpt2, with ALiBi over 6 heads instead of learned positions, and a bias of
                      the scores for each sequence and head, whose gradient is recorded
    mask_packed       like bert, with packed documents, a sliding window both ways, and a boolean mask
    gpt2_untied       like gpt2, without label smoothing, with an untied head; 8 heads of size 2; its
                      vocabulary of 53 and its ffn of 42 are multiples of neither 4 nor 8
    llama_tied        like llama, with a tied head and biases everywhere; 2 groups of queries

Gradients are those of sum(loss of each token) / (number of targets that are not ignored). Then
AdamW does 5 steps on the same batch, each with the gradient clipped to norm max_norm, weight decay
on matrices and embeddings only. AdamW's eps is 1e-8 for llama and 1e-5 for the others: a key bias
shifts all scores of a query alike, so its true gradient is 0. With 1e-8, AdamW would turn the
rounding noise of this gradient into full steps, which differ between any two programs. A larger eps
also tests where it is added.

File format, little endian, no padding:

    char magic[8] = "MTGOLD01"; int32 records; then each record:
    char name[64] (zero-filled); int32 dtype (0: float32, 1: int32), rows, cols; the elements

Records (a vector is [1, n]; a parameter has the library's name and layout: weights [out, in],
QKV rows per query group [q..q k v], SwiGLU fc1 rows [gate; up]):

    config/NAME     [1, 1]: what mt_gpt_desc and AdamW need; valid: targets that are not ignored
    ids, targets    [sequences, seq]; lengths [1, sequences]
    initial/PARAM   the parameter; gradient/PARAM its gradient there; final/PARAM it after 5 steps
    logits          [tokens, vocab]; loss [1, tokens]; grad_norm [1, 1]: at the initial parameters
    step_loss       [1, 5]: sum(loss) / valid before each of the 5 steps
    positions       [sequences, seq], packed models: the position of each token in its document
    bias            [sequences * heads * seq, seq]; gradient_bias: its gradient at the initial
                    parameters
    mask            [seq, seq]: 0 where a query does not see a key
"""

import math
import os
import struct
import sys

import torch
import torch.nn.functional as F

SEQUENCES, SEQ, STEPS = 4, 12, 5

PRE_LN, POST_LN, RESIDUAL_POST_LN = 0, 1, 2       # mt_ln_placement
LAYER_NORM, RMS_NORM = 0, 1                       # mt_norm_kind
GELU_TANH, GELU_ERF, SWIGLU = 0, 1, 2             # mt_activation
CAUSAL, BIDIRECTIONAL = 0, 1                      # mt_mask

DEFAULTS = dict(
    sequences=SEQUENCES, seq=SEQ, placement=PRE_LN, norm=LAYER_NORM, norm_eps=1e-5,
    activation=GELU_TANH, mask=CAUSAL, rotary_base=0.0, no_bias=0, untied_head=0,
    label_smoothing=0.0, ignore_index=-100, steps=STEPS, lr=1e-2, beta1=0.9, beta2=0.95,
    adam_eps=1e-5, weight_decay=0.1, max_norm=1.0)

VARIANTS = {
    "gpt2": dict(
        vocab=61, layers=2, hidden=16, heads=4, kv_heads=4, ffn=64, label_smoothing=0.1),
    "llama": dict(
        vocab=37, layers=2, hidden=32, heads=8, kv_heads=4, ffn=34, norm=RMS_NORM, norm_eps=1e-3,
        activation=SWIGLU, rotary_base=10000.0, no_bias=1, untied_head=1, adam_eps=1e-8),
    "bert": dict(
        vocab=61, layers=2, hidden=16, heads=8, kv_heads=8, ffn=64, placement=POST_LN,
        activation=GELU_ERF, mask=BIDIRECTIONAL, max_norm=1.5),
    "residual_post_ln": dict(
        vocab=61, layers=1, hidden=16, heads=4, kv_heads=4, ffn=64, placement=RESIDUAL_POST_LN,
        ignore_index=-1),
    "window_packed": dict(
        vocab=37, layers=2, hidden=32, heads=8, kv_heads=4, ffn=34, norm=RMS_NORM,
        activation=SWIGLU, rotary_base=100.0, no_bias=1, window=4, softcap=1.5),
    "alibi_bias": dict(
        vocab=61, layers=2, hidden=24, heads=6, kv_heads=6, ffn=64, alibi=1),
    "mask_packed": dict(
        vocab=61, layers=2, hidden=16, heads=4, kv_heads=4, ffn=64, placement=POST_LN,
        activation=GELU_ERF, mask=BIDIRECTIONAL, window=5),
    "gpt2_untied": dict(
        vocab=53, layers=2, hidden=16, heads=8, kv_heads=8, ffn=42, untied_head=1),
    "llama_tied": dict(
        vocab=37, layers=2, hidden=32, heads=8, kv_heads=2, ffn=22, norm=RMS_NORM, norm_eps=1e-3,
        activation=SWIGLU, rotary_base=500.0),
}
LENGTHS = {"bert": [12, 7, 12, 10], "mask_packed": [12, 12, 9, 12]}
DOCUMENTS = {"window_packed": [[12], [5, 7], [1, 8, 3], [2, 2, 8]],  # tokens of each document
             "mask_packed": [[3, 9], [12], [6, 6], [1, 1, 10]]}
IGNORED = {"gpt2": [0, 5, 17, 23, 40, 47], "residual_post_ln": [3, 30],  # token indices
           "gpt2_untied": [7, 30], "llama_tied": [0, 11, 12, 46]}


def stack(c):
    """What precedes the names of the layers and of the final norm."""
    return "encoder" if "token_types" in c else "decoder"


def has_positions(c):
    return not c["rotary_base"] and not c.get("alibi")


def make_parameters(c, generator):
    """All parameters by the library's names, float64 holding float32 values. A configuration with
    token_types is a whole BERT, see make_bert.py."""
    head_dim = c["hidden"] // c["heads"]
    qkv = (c["heads"] + 2 * c["kv_heads"]) * head_dim
    fc1 = c["ffn"] * (2 if c["activation"] == SWIGLU else 1)
    parameters = {}

    def add(name, shape, std, mean=0.0):
        value = mean + std * torch.randn(shape, generator=generator, dtype=torch.float64)
        parameters[name] = value.to(torch.float32).to(torch.float64)

    def add_linear(name, rows, cols):
        add(name + ".weight", (rows, cols), 1.5 / math.sqrt(cols))
        if not c["no_bias"]:
            add(name + ".bias", (rows,), 0.3)

    def add_norm(name):
        add(name + ".weight", (c["hidden"],), 0.3, 1.0)
        if c["norm"] == LAYER_NORM:
            add(name + ".bias", (c["hidden"],), 0.3)

    add("embedding.word_embeddings.weight", (c["vocab"], c["hidden"]), 0.4)
    if has_positions(c):
        add("embedding.position_embeddings.weight", (c["seq"], c["hidden"]), 0.3)
    if "token_types" in c:
        add("embedding.tokentype_embeddings.weight", (c["token_types"], c["hidden"]), 0.3)
        if c["placement"] == POST_LN:
            add_norm("embedding.layernorm")
    for i in range(c["layers"]):
        layer = f"{stack(c)}.layers.{i}."
        add_norm(layer + "input_layernorm")
        add_linear(layer + "self_attention.linear_qkv", qkv, c["hidden"])
        add_linear(layer + "self_attention.linear_proj", c["hidden"], c["heads"] * head_dim)
        add_norm(layer + "pre_mlp_layernorm")
        add_linear(layer + "mlp.linear_fc1", fc1, c["hidden"])
        add_linear(layer + "mlp.linear_fc2", c["hidden"], c["ffn"])
    if c["placement"] != POST_LN:
        add_norm(stack(c) + ".final_layernorm")
    if c["untied_head"]:
        add("output_layer.weight", (c["vocab"], c["hidden"]), 0.4)
    if "token_types" in c:
        add_linear("lm_head.dense", c["hidden"], c["hidden"])
        add_norm("lm_head.layer_norm")
        add("output_layer.bias", (c["vocab"],), 0.3)
        add_linear("pooler.dense", c["hidden"], c["hidden"])
        add_linear("binary_head", 2, c["hidden"])
    return parameters


def norm(c, p, name, x):
    if c["norm"] == RMS_NORM:
        return F.rms_norm(x, (c["hidden"],), p[name + ".weight"], c["norm_eps"])
    return F.layer_norm(x, (c["hidden"],), p[name + ".weight"], p[name + ".bias"], c["norm_eps"])


def linear(p, name, x):
    return F.linear(x, p[name + ".weight"], p.get(name + ".bias"))


def rotate(c, x, positions):
    """Rotary embedding of x [sequences, heads, seq, head_dim], two-halves form."""
    half = x.shape[-1] // 2
    frequency = c["rotary_base"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.to(torch.float64)[:, None, :, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def alibi_slopes(heads):
    """The slopes of the heads, as the authors of ALiBi define them (arXiv 2108.12409, and the code
    that they published for numbers of heads that are not a power of 2)."""
    def of_power(n):
        start = 2.0 ** (-(2.0 ** -(math.log2(n) - 3)))
        return [start * start ** i for i in range(n)]
    if math.log2(heads).is_integer():
        return of_power(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return of_power(closest) + alibi_slopes(2 * closest)[0::2][:heads - closest]


def changed_attention(c, q, k, v, batch):
    """Attention whose scores are changed. q, k, v are [sequences, heads, seq, head_dim]."""
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if c.get("softcap"):
        s = c["softcap"] * torch.tanh(s / c["softcap"])
    at = torch.arange(c["seq"])
    distance = (at[:, None] - at[None, :]).abs()
    if c.get("alibi"):
        s = s - torch.tensor(alibi_slopes(c["heads"]), dtype=s.dtype)[:, None, None] * distance
    if "bias" in batch:
        s = s + batch["bias"].to(s.dtype).view(c["sequences"], c["heads"], c["seq"], c["seq"])
    sees = (at[None, :] < batch["lengths"][:, None])[:, None, :].expand(-1, c["seq"], -1)
    if c["mask"] == CAUSAL:
        sees = sees & (at[None, :] <= at[:, None])
    if c.get("window"):
        sees = sees & (distance < c["window"])
    if "positions" in batch:
        start = at - batch["positions"]
        sees = sees & (start[:, :, None] == start[:, None, :])
    if "mask" in batch:
        sees = sees & (batch["mask"] != 0)
    p = s.masked_fill(~sees[:, None], -1e9).softmax(dim=-1)
    return (p * sees[:, None]) @ v                           # 0 for a query that sees no key


def attention(c, p, name, x, batch):
    b, s = c["sequences"], c["seq"]
    groups, per_group = c["kv_heads"], c["heads"] // c["kv_heads"]
    head_dim = c["hidden"] // c["heads"]
    qkv = linear(p, name + ".linear_qkv", x).view(b, s, groups, per_group + 2, head_dim)
    q = qkv[:, :, :, :per_group].reshape(b, s, c["heads"], head_dim).transpose(1, 2)
    k = qkv[:, :, :, per_group].transpose(1, 2)
    v = qkv[:, :, :, per_group + 1].transpose(1, 2)
    if c["rotary_base"]:
        positions = batch.get("positions", torch.arange(c["seq"])[None])
        q, k = rotate(c, q, positions), rotate(c, k, positions)
    k, v = k.repeat_interleave(per_group, dim=1), v.repeat_interleave(per_group, dim=1)
    if any(name in c for name in ("window", "softcap", "alibi")):
        out = changed_attention(c, q, k, v, batch)
    elif c["mask"] == CAUSAL:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        key_mask = torch.arange(s)[None, :] < batch["lengths"][:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask[:, None, None, :])
    return linear(p, name + ".linear_proj", out.transpose(1, 2).reshape(b, s, c["hidden"]))


def gelu(c, x):
    return F.gelu(x, approximate="tanh" if c["activation"] == GELU_TANH else "none")


def mlp(c, p, name, x):
    h = linear(p, name + ".linear_fc1", x)
    if c["activation"] == SWIGLU:
        gate, up = h.chunk(2, dim=-1)
        h = F.silu(gate) * up
    else:
        h = gelu(c, h)
    return linear(p, name + ".linear_fc2", h)


def layer(c, p, name, x, batch):
    def norm1(t): return norm(c, p, name + "input_layernorm", t)
    def norm2(t): return norm(c, p, name + "pre_mlp_layernorm", t)
    def attend(t): return attention(c, p, name + "self_attention", t, batch)
    def feed(t): return mlp(c, p, name + "mlp", t)
    if c["placement"] == PRE_LN:
        x = x + attend(norm1(x))
        return x + feed(norm2(x))
    if c["placement"] == POST_LN:
        x = norm1(x + attend(x))
        return norm2(x + feed(x))
    n = norm1(x)
    m = norm2(n + attend(n))
    return m + feed(m)


def hidden_states(c, p, batch):
    """[sequences, seq, hidden]"""
    x = F.embedding(batch["ids"], p["embedding.word_embeddings.weight"])
    if has_positions(c):
        table = p["embedding.position_embeddings.weight"]
        x = x + (F.embedding(batch["positions"], table) if "positions" in batch else table[None])
    if "token_types" in batch:
        x = x + F.embedding(batch["token_types"], p["embedding.tokentype_embeddings.weight"])
        if c["placement"] == POST_LN:
            x = norm(c, p, "embedding.layernorm", x)
    for i in range(c["layers"]):
        x = layer(c, p, f"{stack(c)}.layers.{i}.", x, batch)
    if c["placement"] != POST_LN:
        x = norm(c, p, stack(c) + ".final_layernorm", x)
    return x


def forward(c, p, batch):
    """What a file records of a forward pass: logits [tokens, vocab], and the loss of each token, 0
    where ignored. Then the sum of the losses that the gradient is of."""
    x = hidden_states(c, p, batch)
    head = p["output_layer.weight" if c["untied_head"] else "embedding.word_embeddings.weight"]
    logits = F.linear(x, head).view(-1, c["vocab"])
    loss = F.cross_entropy(logits, batch["targets"].view(-1), ignore_index=c["ignore_index"],
                           reduction="none", label_smoothing=c["label_smoothing"])
    return {"logits": logits, "loss": loss}, loss.sum() / c["valid"]


def train(c, forward, initial, batch, dtype):
    """All values that a file records about one run, computed in dtype; and the gradient norms."""
    p = {name: value.to(dtype).clone().requires_grad_() for name, value in initial.items()}
    optimizer = torch.optim.AdamW(
        [{"params": [t for t in p.values() if t.dim() == 2], "weight_decay": c["weight_decay"]},
         {"params": [t for t in p.values() if t.dim() == 1], "weight_decay": 0.0}], lr=c["lr"],
        betas=(c["beta1"], c["beta2"]), eps=c["adam_eps"])
    out, step_loss, norms = {}, [], []
    if "bias" in batch:
        batch["bias"].grad = None
    for step in range(c["steps"]):
        optimizer.zero_grad()
        values, total = forward(c, p, batch)
        total.backward()
        step_loss.append(total.item())
        if step == 0:
            out.update({name: value.detach() for name, value in values.items()})
            out.update({"gradient/" + name: t.grad.clone() for name, t in p.items()})
            if "bias" in batch:
                out["gradient_bias"] = batch["bias"].grad.clone()
        norms.append(torch.nn.utils.clip_grad_norm_(list(p.values()), c["max_norm"]).item())
        optimizer.step()
    out["grad_norm"] = torch.tensor([norms[0]], dtype=torch.float64)
    out["step_loss"] = torch.tensor(step_loss, dtype=torch.float64)
    out.update({"final/" + name: t.detach() for name, t in p.items()})
    return out, norms


def record(name, tensor):
    """One record as bytes; floating point is rounded to float32."""
    floating = tensor.is_floating_point()
    tensor = tensor.detach().to(torch.float32 if floating else torch.int32)
    tensor = tensor.reshape(1, -1) if tensor.dim() < 2 else tensor
    assert len(name) < 64 and tensor.dim() == 2
    assert not floating or bool(torch.isfinite(tensor).all())
    head = struct.pack("<64s3i", name.encode(), 0 if floating else 1, *tensor.shape)
    return head + tensor.contiguous().numpy().astype("<f4" if floating else "<i4").tobytes()


def relative_error(got, want):
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def make_batch(c, generator, lengths, ignored):
    """ids, targets and lengths; `ignored` are indices of tokens without a target. Sets c["valid"]."""
    ids = torch.randint(0, c["vocab"], (c["sequences"], c["seq"]), generator=generator)
    targets = torch.randint(0, c["vocab"], (c["sequences"], c["seq"]), generator=generator)
    lengths = torch.tensor(lengths or [c["seq"]] * c["sequences"])
    for token in ignored:
        targets.view(-1)[token] = c["ignore_index"]
    targets[torch.arange(c["seq"])[None, :] >= lengths[:, None]] = c["ignore_index"]
    ids[0, 0], ids[0, 1] = 0, c["vocab"] - 1                 # first and last row of the table
    targets[0, 1], targets[0, 2] = 0, c["vocab"] - 1
    c["valid"] = int((targets != c["ignore_index"]).sum())
    return {"ids": ids, "targets": targets, "lengths": lengths}


def add_to_batch(name, c, batch, generator):
    """What changes the scores of a model beside the numbers in its configuration."""
    if name in DOCUMENTS:
        assert all(sum(documents) == c["seq"] for documents in DOCUMENTS[name])
        batch["positions"] = torch.cat([torch.arange(n) for row in DOCUMENTS[name] for n in row])
        batch["positions"] = batch["positions"].view(c["sequences"], c["seq"])
    if name == "alibi_bias":
        shape = (c["sequences"] * c["heads"] * c["seq"], c["seq"])
        bias = torch.randn(shape, generator=generator, dtype=torch.float64)
        batch["bias"] = bias.to(torch.float32).to(torch.float64).requires_grad_()
    if name == "mask_packed":
        mask = torch.rand((c["seq"], c["seq"]), generator=generator) < 0.75
        batch["mask"] = (mask | torch.eye(c["seq"], dtype=torch.bool)).to(torch.int32)


def make_file(name, c, forward, initial, batch):
    """The bytes of one file, and a line for the table."""
    out, norms = train(c, forward, initial, batch, torch.float64)
    single, _ = train(c, forward, initial, batch, torch.float32)

    records = [record("config/" + key, torch.tensor([value])) for key, value in c.items()]
    records += [record(key, value) for key, value in batch.items()]
    records += [record("initial/" + key, value) for key, value in initial.items()]
    records += [record(key, value) for key, value in out.items()]
    data = b"MTGOLD01" + struct.pack("<i", len(records)) + b"".join(records)

    def worst(prefix):
        return max(relative_error(single[k], out[k]) for k in out if k.startswith(prefix))
    parameters = sum(value.numel() for value in initial.values())
    line = (f"{name:18s} {len(data):7d} {parameters:7d} "
            f"{worst('logits'):8.1e} {worst('loss'):8.1e} "
            f"{worst('gradient/'):8.1e} {worst('final/'):8.1e}  "
            + " ".join(f"{n:.2f}" for n in norms) + "  "
            + " ".join(f"{v:.3f}" for v in out["step_loss"].tolist()))
    return data, line


def make(name, seed):
    c = {**DEFAULTS, **VARIANTS[name]}
    generator = torch.Generator().manual_seed(seed)
    initial = make_parameters(c, generator)
    batch = make_batch(c, generator, LENGTHS.get(name), IGNORED.get(name, []))
    add_to_batch(name, c, batch, generator)
    return make_file(name, c, forward, initial, batch)


def write_or_check(names, make, first_seed, usage):
    """Makes the files of these names, or of those in the command line, and writes them, or with
    --check compares them with those here. Returns the number of files that differ."""
    check = sys.argv[1:2] == ["--check"]
    wanted = sys.argv[2 if check else 1:]
    if not set(wanted) <= set(names):
        sys.exit(usage)
    torch.set_num_threads(1)
    folder = os.path.dirname(os.path.abspath(__file__))
    print(f"torch {torch.__version__}; errors of float32 PyTorch, relative to the largest element "
          "of each tensor, the worst tensor of each kind")
    print(f"{'file':18s} {'bytes':>7s} {'params':>7s} {'logits':>8s} {'loss':>8s} {'gradient':>8s} "
          f"{'final':>8s}  "
          "gradient norm of each step  loss of each step")
    different = 0
    for seed, name in enumerate(names, start=first_seed):
        if wanted and name not in wanted:
            continue
        data, line = make(name, seed)
        path = os.path.join(folder, name + ".bin")
        if check:
            with open(path, "rb") as file:
                same = file.read() == data
            different += not same
            line += "  same" if same else "  DIFFERS"
        else:
            with open(path, "wb") as file:
                file.write(data)
        print(line)
    return different


if __name__ == "__main__":
    sys.exit(1 if write_or_check(VARIANTS, make, 1234, __doc__) else 0)
