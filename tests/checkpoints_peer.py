"""Python's safetensors on the other side: python tests/checkpoints_peer.py PROGRAM DIRECTORY

PROGRAM is tests/checkpoints_peer.c. It writes a checkpoint of a small GPT-2, whose numbers are computed here once
more; this reads it with Python's safetensors. The other way round, this writes files, which PROGRAM reads: good ones,
and mutations of them, of which each of the two has to say the same: that it is a safetensors file, or that it is none.
"""

import json
import os
import random
import struct
import subprocess
import sys

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

program, directory = sys.argv[1:3]
HIDDEN, HEADS, LAYERS, VOCAB, SEQ, FFN = 8, 2, 2, 11, 6, 12


def run(*arguments, text=None):
    done = subprocess.run([program, *arguments], input=text, capture_output=True, text=True, timeout=1800, check=True)
    return done.stdout


def numbers(index, shape):
    """Element k of parameter `index` of the registry, in the registry's layout."""
    n = int(np.prod(shape))
    return ((np.arange(n) * 37 + index * 101) % 997 / 512 - 1).astype(np.float32).reshape(shape)


def registry():
    """Names, as transformers has them, and how the registry's [out, in] and grouped QKV lie there."""
    def conv1d(w):
        return w.T

    def separate(w):  # rows per head: its query, its key, its value
        parts = w.reshape(HEADS, 3, HIDDEN // HEADS, -1).transpose(1, 0, 2, 3)
        return parts.reshape(3 * HIDDEN, -1)

    def qkv_weight(w):
        return separate(w).T

    def qkv_bias(b):
        return separate(b.reshape(-1, 1)).reshape(-1)

    def same(x):
        return x

    yield "wte.weight", (VOCAB, HIDDEN), same
    yield "wpe.weight", (SEQ, HIDDEN), same
    for i in range(LAYERS):
        yield f"h.{i}.ln_1.weight", (HIDDEN,), same
        yield f"h.{i}.ln_1.bias", (HIDDEN,), same
        yield f"h.{i}.attn.c_attn.weight", (3 * HIDDEN, HIDDEN), qkv_weight
        yield f"h.{i}.attn.c_attn.bias", (3 * HIDDEN,), qkv_bias
        yield f"h.{i}.attn.c_proj.weight", (HIDDEN, HIDDEN), conv1d
        yield f"h.{i}.attn.c_proj.bias", (HIDDEN,), same
        yield f"h.{i}.ln_2.weight", (HIDDEN,), same
        yield f"h.{i}.ln_2.bias", (HIDDEN,), same
        yield f"h.{i}.mlp.c_fc.weight", (FFN, HIDDEN), conv1d
        yield f"h.{i}.mlp.c_fc.bias", (FFN,), same
        yield f"h.{i}.mlp.c_proj.weight", (HIDDEN, FFN), conv1d
        yield f"h.{i}.mlp.c_proj.bias", (HIDDEN,), same
    yield "ln_f.weight", (HIDDEN,), same
    yield "ln_f.bias", (HIDDEN,), same


def opens_ours():
    run("save", directory)
    step = os.path.join(directory, "step-00000005")
    expected = {"transformer." + name: form(numbers(i, shape)) for i, (name, shape, form) in enumerate(registry())}
    with safe_open(os.path.join(step, "model.safetensors"), "np") as f:
        assert set(f.keys()) == set(expected), set(f.keys()) ^ set(expected)
        metadata = f.metadata()
        assert metadata["format"] == "pt" and metadata["step"] == "5" and metadata["note"] == 'a "note"\n\u00e9'
        for name, want in expected.items():
            got = f.get_tensor(name)
            assert got.dtype == np.float32 and got.shape == want.shape, (name, got.shape)
            assert (got == want).all(), name
    with safe_open(os.path.join(step, "optimizer.safetensors"), "np") as f:
        assert len(list(f.keys())) == 2 * len(expected)
        assert f.get_tensor("decoder.layers.1.self_attention.linear_qkv.weight.exp_avg").shape == (3 * HIDDEN, HIDDEN)
    config = json.load(open(os.path.join(step, "config.json")))
    assert (config["n_embd"], config["n_head"], config["n_inner"], config["vocab_size"]) == (HIDDEN, HEADS, FFN, VOCAB)
    print(f"{len(expected)} tensors of ours are what they should be")


def opens_what_the_writer_wrote():
    path = os.path.join(directory, "written.safetensors")
    run("write", path)
    with safe_open(path, "np") as f:
        metadata = dict(f.metadata())
        assert len(metadata.pop("checksum")) == 16 and metadata == {"key": "v\u00e4lue", "k2": ""}, metadata
        assert set(f.keys()) == {"na\u00efve \"name\"\\\n", "d"}
        assert (f.get_tensor("na\u00efve \"name\"\\\n") == np.arange(15, dtype=np.float32).reshape(3, 5) / 4).all()
        got = f.get_tensor("d")
        assert got.dtype == np.float64 and (got == np.array([1 / 3, -2, 1e300, 0])).all()
    print("what the writer wrote is read")


def we_open_theirs():
    tensors = {"f": numbers(1, (3, 5)), "h": numbers(2, (7,)).astype(np.float16), "i": np.arange(4),
               "d": np.linspace(-1, 1, 9) / 3,
               "s": np.float32(2.5), "empty": np.zeros((0, 3), np.float32),
               "na\u00efve \"name\"\\\n": np.ones((2, 1, 2), np.float32)}
    path = os.path.join(directory, "theirs.safetensors")
    save_file({k: np.asarray(v) for k, v in tensors.items()}, path, {"key": "v\u00e4lue", "k2": ""})
    lines = json.loads(run("list", path))
    assert set(lines) == set(tensors), lines
    for name, x in tensors.items():
        x = np.asarray(x)
        assert lines[name]["shape"] == list(x.shape), (name, lines[name])
        if x.dtype != np.int64:
            assert np.allclose(lines[name]["values"], x.astype(np.float32).ravel(), atol=0), name
    print(f"{len(tensors)} tensors of theirs are read")
    return open(path, "rb").read()


def mutations(good):
    """Headers with one thing changed."""
    size = struct.unpack("<Q", good[:8])[0]
    header, data = good[8:8 + size], good[8 + size:]
    words = [b"0", b"1", b"-1", b"9223372036854775808", b"[", b"]", b"{", b"}", b'"', b",", b":", b" ", b"\\",
             b"\\u0041", b"null", b"1.0", b"\xff", b"F32", b'"x":1,', b"\n", b"\\ud800", b"\x01", b"true"]
    rng = random.Random(5)
    for _ in range(6000):
        h = bytearray(header)
        for _ in range(rng.choice([1, 1, 1, 2])):
            at, n = rng.randrange(len(h)), rng.choice([0, 0, 1, 1, 2, 5])
            h[at:at + n] = rng.choice([rng.choice(words), bytes([rng.randrange(256)]), b"", h[at:at + 1] * 2])
        d = data[:len(data) - rng.choice([0] * 9 + [1])]
        yield struct.pack("<Q", len(h)) + bytes(h) + d


def refused_on_purpose(raw):
    """What the format forbids and its Python library may let pass: a key given twice, a NUL, a header that does not
    begin with a brace, what is not JSON."""
    header = raw[8:8 + struct.unpack("<Q", raw[:8])[0]]
    pairs = []
    try:
        json.loads(header.decode(), object_pairs_hook=lambda p: pairs.append([k for k, _ in p]))
    except ValueError:
        return True
    return header[:1] != b"{" or b"\\u0000" in header or any(len(set(p)) != len(p) for p in pairs)


def agree(good):
    cases = list(mutations(good))
    paths = []
    for i, raw in enumerate(cases):
        paths.append(os.path.join(directory, f"m{i}"))
        with open(paths[-1], "wb") as f:
            f.write(raw)
    ours = run("judge", text="\n".join(paths) + "\n").split()
    assert len(ours) == len(cases)
    taken = 0
    for path, raw, our in zip(paths, cases, ours):
        try:
            with safe_open(path, "np"):
                their = "good"
        except SafetensorError:
            their = "bad"
        taken += our == "good"
        if our != their and not (our == "bad" and refused_on_purpose(raw)):
            sys.exit(f"{path}: we say {our}, Python's safetensors {their}: {raw!r}")
    assert 300 < taken < len(cases) - 300, taken
    print(f"{len(cases)} mutations, {taken} of them good: both say the same")


opens_ours()
opens_what_the_writer_wrote()
agree(we_open_theirs())
