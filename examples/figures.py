#!/usr/bin/env python3
"""Draws the figures of the documentation from the logs of real runs. Needs matplotlib.

    python3 examples/figures.py losses OUT.svg LABEL=LOG.csv [LABEL=LOG.csv ...]

losses: training loss over steps, one curve for each log that train_gpt --log has written. docs/loss.svg was made by

    flags="--layers 2 --hidden 64 --heads 4 --seq 64 --steps 400 --sample 0 --eval-interval 0 --data LICENSE"
    build/train_gpt $flags --tp 1 --log one.csv
    build/train_gpt $flags --tp 2 --dp 2 --sequence-parallel --log four.csv
    python3 examples/figures.py losses docs/loss.svg "1 rank=one.csv" "4 ranks: 2 x tensor, 2 x data=four.csv"
"""
import csv
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "megatron.h"  # the same bytes in every run
import matplotlib.pyplot as plt


def read_log(path):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [int(row["step"]) for row in rows], [float(row["loss"]) for row in rows]


def draw_losses(out, logs):
    """The first curve is wide and light, so that another one on top of it can be seen."""
    figure, axes = plt.subplots(figsize=(7, 3))
    for i, log in enumerate(logs):
        label, path = log.rsplit("=", 1)
        steps, losses = read_log(path)
        wide = i == 0
        axes.plot(steps, losses, label=label, linewidth=5 if wide else 1.2, alpha=0.45 if wide else 1)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def main(arguments):
    if len(arguments) < 3 or arguments[0] != "losses":
        sys.exit(__doc__)
    draw_losses(arguments[1], arguments[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
