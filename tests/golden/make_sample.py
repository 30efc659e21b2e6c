"""Writes sample.txt: which tokens the warpers of Hugging Face's transformers keep.

    python tests/golden/make_sample.py

A case has three lines: temperature, top_k (0: none) and top_p (1: none); the logits; the ids that are kept. The logits
of a case are distinct multiples of 1/64, so that f32 and bf16 hold them."""

import pathlib
import random

import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def kept(logits, temperature, top_k, top_p):
    """The order in which generate() applies the warpers."""
    scores = TemperatureLogitsWarper(temperature)(None, torch.tensor([logits], dtype=torch.float64))
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return [i for i, score in enumerate(scores[0].tolist()) if score > float("-inf")]


def main():
    random.seed(5)
    lines = []
    for _ in range(60):
        vocab = random.choice([5, 12, 20])
        temperature = random.choice([0.5, 1.0, 1.5, 3.0])
        top_k = random.choice([0, 2, 4, 7, 40])
        top_p = random.choice([1.0, 0.03125, 0.25, 0.5, 0.75, 0.9375])
        logits = [n / 64 for n in random.sample(range(-127, 128), vocab)]
        lines.append(f"{temperature} {top_k} {top_p} {vocab}")
        lines.append(" ".join(str(x) for x in logits))
        lines.append(" ".join(str(i) for i in kept(logits, temperature, top_k, top_p)))
    (pathlib.Path(__file__).parent / "sample.txt").write_text("\n".join(lines) + "\n")


main()
