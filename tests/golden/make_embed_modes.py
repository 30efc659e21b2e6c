"""Writes sentence embeddings of the modes of pooling of sentence-transformers, for examples/embed.c.

    python tests/golden/make_embed_modes.py

embed/MODE.txt  for the sentences of embed/ids.txt, a vector in each line, not normalised

The BERT of bert_hf/ is computed by NumPy in float64, one sentence at a time. Its means are compared with
embed/vectors.txt, which transformers has computed. The modes are those of the class Pooling of sentence-transformers
5.4. Created with NumPy 2.4.6.
"""

import json
import math
import os
import struct

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.path.join(HERE, "bert_hf")


def read_weights(path):
    with open(path, "rb") as file:
        data = file.read()
    size, = struct.unpack("<Q", data[:8])
    weights = {}
    for name, tensor in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            flat = np.frombuffer(data[8 + size + begin:8 + size + end], "<f4")
            weights[name] = flat.reshape(tensor["shape"]).astype(np.float64)
    return weights


with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as config_file:
    CONFIG = json.load(config_file)
WEIGHTS = read_weights(os.path.join(MODEL, "model.safetensors"))
GELU = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))))


def dense(name, x):
    return x @ WEIGHTS[f"bert.{name}.weight"].T + WEIGHTS[f"bert.{name}.bias"]


def norm(name, x):
    centred = x - x.mean(1, keepdims=True)
    scale = np.sqrt((centred**2).mean(1, keepdims=True) + CONFIG["layer_norm_eps"])
    return centred / scale * WEIGHTS[f"bert.{name}.LayerNorm.weight"] + WEIGHTS[f"bert.{name}.LayerNorm.bias"]


def attention(layer, x):
    heads = CONFIG["num_attention_heads"]
    query, key, value = (dense(f"{layer}.attention.self.{part}", x).reshape(len(x), heads, -1).transpose(1, 0, 2)
                         for part in ("query", "key", "value"))
    scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[2])
    weights = np.exp(scores - scores.max(2, keepdims=True))
    out = weights / weights.sum(2, keepdims=True) @ value
    return out.transpose(1, 0, 2).reshape(len(x), -1)


def encode(ids):
    tables = "bert.embeddings.{}_embeddings.weight"
    x = WEIGHTS[tables.format("word")][ids] + WEIGHTS[tables.format("position")][:len(ids)]
    x = norm("embeddings", x + WEIGHTS[tables.format("token_type")][0])
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        x = norm(f"{layer}.attention.output", x + dense(f"{layer}.attention.output.dense", attention(layer, x)))
        inner = GELU(dense(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output", x + dense(f"{layer}.output.dense", inner))
    return x


def weighted_mean(y):
    weights = np.arange(1, len(y) + 1)
    return weights @ y / weights.sum()


MODES = {"cls": lambda y: y[0], "max": lambda y: y.max(0), "mean": lambda y: y.mean(0),
         "mean_sqrt_len_tokens": lambda y: y.sum(0) / math.sqrt(len(y)), "weightedmean": weighted_mean,
         "lasttoken": lambda y: y[-1]}

with open(os.path.join(HERE, "embed", "ids.txt"), encoding="ascii") as ids_file:
    outputs = [encode([int(word) for word in line.split()]) for line in ids_file]
means = np.array([MODES["mean"](y) for y in outputs])
theirs = np.loadtxt(os.path.join(HERE, "embed", "vectors.txt"))
assert np.abs(means / np.linalg.norm(means, axis=1, keepdims=True) - theirs).max() < 1e-8
for mode, pool in MODES.items():
    with open(os.path.join(HERE, "embed", mode + ".txt"), "w", encoding="ascii") as out_file:
        out_file.writelines(" ".join(f"{x:.9g}" for x in pool(y)) + "\n" for y in outputs)
