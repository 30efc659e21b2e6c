#!/usr/bin/env python3
"""Draws the figures of the documentation from the logs of real runs. Needs matplotlib.

    python3 examples/figures.py losses    OUT.svg LABEL=LOG.csv [LABEL=LOG.csv ...]
    python3 examples/figures.py placement OUT.svg LABEL=LOG.csv [LABEL=LOG.csv ...]

losses: training loss over steps, one curve for each log that train_gpt --log has written. docs/loss.svg was made by

    flags="--layers 2 --hidden 64 --heads 4 --seq 64 --steps 400 --sample 0 --eval-interval 0 --data LICENSE"
    build/train_gpt $flags --tp 1 --log one.csv
    build/train_gpt $flags --tp 2 --dp 2 --sequence-parallel --log four.csv
    python3 examples/figures.py losses docs/loss.svg "1 rank=one.csv" "4 ranks: 2 x tensor, 2 x data=four.csv"

placement: masked-LM loss over steps, one curve for each log of train_bert: the mean of each 20 steps, and the
validations as dots. docs/training.md, "Train a BERT", has the commands that made docs/placement.svg.
"""
import csv
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "megatron.h"  # the same bytes in every run
import matplotlib.pyplot as plt

MEAN_OF = 20


def read_log(path, column="loss"):
    """The steps and the values of a column, without the steps that have no value."""
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[column]]
    return [int(row["step"]) for row in rows], [float(row[column]) for row in rows]


def finish(figure, axes, out, ylabel):
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def draw_losses(out, logs):
    """The first curve is wide and light, so that another one on top of it can be seen."""
    figure, axes = plt.subplots(figsize=(7, 3))
    for i, log in enumerate(logs):
        label, path = log.rsplit("=", 1)
        steps, losses = read_log(path)
        wide = i == 0
        axes.plot(steps, losses, label=label, linewidth=5 if wide else 1.2, alpha=0.45 if wide else 1)
    finish(figure, axes, out, "training loss")


def draw_placement(out, logs):
    figure, axes = plt.subplots(figsize=(7, 3))
    for log in logs:
        label, path = log.rsplit("=", 1)
        steps, losses = read_log(path, "lm_loss")
        parts = range(MEAN_OF, len(steps) + 1, MEAN_OF)
        means = [sum(losses[end - MEAN_OF:end]) / MEAN_OF for end in parts]
        line, = axes.plot([steps[end - 1] for end in parts], means, label=label, linewidth=1.2)
        axes.plot(*read_log(path, "val_lm_loss"), "o", color=line.get_color(), markersize=3)
    axes.set_ylim(top=4)
    finish(figure, axes, out, "masked-LM loss")


DRAW = {"losses": draw_losses, "placement": draw_placement}


def main(arguments):
    if len(arguments) < 3 or arguments[0] not in DRAW:
        sys.exit(__doc__)
    DRAW[arguments[0]](arguments[1], arguments[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
