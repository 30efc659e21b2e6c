#!/usr/bin/env python3
"""Draws the figures of the documentation from the logs of real runs. Needs matplotlib.

    python3 examples/figures.py losses     OUT.svg LABEL=LOG.csv [LABEL=LOG.csv ...]
    python3 examples/figures.py placement  OUT.svg LABEL=LOG.csv [LABEL=LOG.csv ...]
    python3 examples/figures.py perplexity OUT.svg LABEL=LOG.csv [[+]LABEL=LOG.csv ...]
    python3 examples/figures.py scaling    OUT.svg PAPER.txt BENCH.txt

losses: training loss over steps, one curve for each log that train_gpt --log has written. docs/loss.svg was made by

    flags="--layers 2 --hidden 64 --heads 4 --seq 64 --steps 400 --sample 0 --eval-interval 0 --data LICENSE"
    build/train_gpt $flags --tp 1 --log one.csv
    build/train_gpt $flags --tp 2 --dp 2 --sequence-parallel --log four.csv
    python3 examples/figures.py losses docs/loss.svg "1 rank=one.csv" "4 ranks: 2 x tensor, 2 x data=four.csv"

placement: masked-LM loss over steps, one curve for each log of train_bert: the mean of each 20 steps, and the
validations as dots. docs/training.md, "Train a BERT", has the commands that made docs/placement.svg.

perplexity: validation perplexity over steps, exp(val_loss), one curve for each log of train_gpt. The perplexity is that
of a token, which is a byte when the data is a text. A label that begins with + is that of another split of the model
before it: its curve is thin and black, on top of the other. docs/training.md, "Larger models learn faster", has the
commands that made docs/perplexity.svg.

scaling: weak scaling in %, as in figure 5 of arXiv 1909.08053. PAPER.txt is the output of examples/paper.c, which has
the numbers of the paper and the predictions. BENCH.txt is the output of tests/bench/bench.c, with the item scaling.
docs/paper.md, "Weak scaling", has the commands that made docs/scaling.svg.
"""
import csv
import math
import re
import sys

MEAN_OF = 20
MODEL_PARALLEL = "Weak scaling: FLOP/s of a GPU"  # the beginnings of the titles of tables
WITH_DATA_PARALLEL = "Weak scaling: the same with 64-way data parallel"

# ---- reading; needs no packages --------------------------------------------------------------------------------------


def split_label(argument):
    label, equals, path = argument.rpartition("=")
    if not equals:
        sys.exit(f"figures.py: {argument}: expected LABEL=LOG.csv")
    return label, path


def read_log(path, column="loss"):
    """The steps and the values of a column, without the steps that have no value."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if column not in (reader.fieldnames or []):
            sys.exit(f"figures.py: {path} has no column {column}")
        rows = [row for row in reader if row[column]]
    if not rows:
        sys.exit(f"figures.py: {path} has no values in column {column}")
    return [int(row["step"]) for row in rows], [float(row[column]) for row in rows]


def read_perplexity(path):
    steps, losses = read_log(path, "val_loss")
    return steps, [math.exp(loss) for loss in losses]


def read_paper(path, title):
    """A table of page 1 of the output of examples/paper.c: GPUs, predictions and the paper's numbers."""
    with open(path) as file:
        page = file.read().partition("==== page 1")[2].partition("==== page 2")[0]
    table = page.partition("\n" + title)[2].partition("\n\n")[0]
    rows = [line.split() for line in table.splitlines() if line.startswith("  GPT-2 ")]
    if not rows:
        sys.exit(f"figures.py: {path} has no table {title}")
    return [int(row[2]) for row in rows], [float(row[5]) for row in rows], [float(row[6]) for row in rows]


def read_bench(path):
    """The cores, the numbers of ranks, and their efficiencies in % of the weak scaling in the output of the benchmark.
    One rank has 100 % by definition."""
    with open(path) as file:
        rows = re.findall(r"^weak, TP=(\d+),.* ([0-9.]+)  efficiency on (\d+) cores", file.read(), re.MULTILINE)
    ranks, cores = [int(row[0]) for row in rows], {int(row[2]) for row in rows}
    if not rows or len(cores) > 1 or len(set(ranks)) < len(ranks):
        sys.exit(f"figures.py: {path}: expected the item scaling of one run of the benchmark")
    return cores.pop(), [1] + ranks, [100.0] + [100 * float(row[1]) for row in rows]


# ---- drawing ---------------------------------------------------------------------------------------------------------


def make_figure(columns=1, **options):
    """A figure and its axes."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("figures.py: the package matplotlib is missing: pip install matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "megatron.h"  # the same bytes in every run
    import matplotlib.pyplot as plt
    return plt.subplots(1, columns, figsize=(7, 3), **options)


def save(figure, out):
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def finish(figure, axes, out, ylabel):
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.legend(frameon=False)
    save(figure, out)


def draw_losses(out, logs):
    """The first curve is wide and light, so that another one on top of it can be seen."""
    figure, axes = make_figure()
    for i, log in enumerate(logs):
        label, path = split_label(log)
        steps, losses = read_log(path)
        wide = i == 0
        axes.plot(steps, losses, label=label, linewidth=5 if wide else 1.2, alpha=0.45 if wide else 1)
    finish(figure, axes, out, "training loss")


def draw_placement(out, logs):
    figure, axes = make_figure()
    for log in logs:
        label, path = split_label(log)
        steps, losses = read_log(path, "lm_loss")
        parts = range(MEAN_OF, len(steps) + 1, MEAN_OF)
        means = [sum(losses[end - MEAN_OF:end]) / MEAN_OF for end in parts]
        line, = axes.plot([steps[end - 1] for end in parts], means, label=label, linewidth=1.2)
        axes.plot(*read_log(path, "val_lm_loss"), "o", color=line.get_color(), markersize=3)
    axes.set_ylim(top=4)
    finish(figure, axes, out, "masked-LM loss")


def draw_perplexity(out, logs):
    """The first steps, where the perplexity falls from that of the vocabulary, are out of sight."""
    figure, axes = make_figure()
    last = []
    for log in logs:
        label, path = split_label(log)
        steps, values = read_perplexity(path)
        style = {"color": "black", "linewidth": 0.8} if label[:1] == "+" else {"linewidth": 3, "alpha": 0.6}
        axes.plot(steps, values, label=label.lstrip("+"), **style)
        last.append(values[-1])
    axes.set_ylim(0.9 * min(last), 1.5 * max(last))
    finish(figure, axes, out, "validation perplexity")


def draw_bars(axes, kinds, cores=None):
    """Bars side by side for each number of GPUs. Each kind of bars has a label, a colour, the numbers of GPUs, and the
    percentages. With more ranks than `cores`, the last kind is light."""
    groups, width = sorted({n for kind in kinds for n in kind[2]}), 0.8 / len(kinds)
    for i, (label, colour, gpus, percentages) in enumerate(kinds):
        places = [groups.index(n) + (i - (len(kinds) - 1) / 2) * width for n in gpus]
        bars = axes.bar(places, percentages, width * 0.92, label=label, color=colour)
        axes.bar_label(bars, [f"{percentage:.0f}" for percentage in percentages], fontsize=6.5, padding=1)
        for bar, n in zip(bars, gpus):
            bar.set_alpha(0.5 if cores and i == len(kinds) - 1 and n > cores else 1)
    axes.set_xticks(range(len(groups)), [str(n) for n in groups])


def draw_scaling(out, files):
    if len(files) != 2:
        sys.exit(__doc__)
    cores, ranks, efficiencies = read_bench(files[1])
    figure, (left, right) = make_figure(2, sharey=True, gridspec_kw={"width_ratios": [1.25, 1], "wspace": 0.06})
    for axes, title in (left, MODEL_PARALLEL), (right, WITH_DATA_PARALLEL):
        gpus, predicted, measured = read_paper(files[0], title)
        kinds = [("the paper, V100", "tab:gray", gpus, measured), ("predicted, V100", "tab:blue", gpus, predicted)]
        if axes is left:
            label = f"measured on {cores} CPU cores (light: more ranks than cores)"
            draw_bars(axes, kinds + [(label, "tab:orange", ranks, efficiencies)], cores)
        else:
            draw_bars(axes, kinds)
    left.set_xlabel("GPUs or ranks, model parallel")
    right.set_xlabel("GPUs, model and data parallel")
    left.set_ylabel("weak scaling, %")
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", bbox_to_anchor=(0.5, 0.9), ncols=3,
                  frameon=False, fontsize=8)
    save(figure, out)


DRAW = {"losses": draw_losses, "placement": draw_placement, "perplexity": draw_perplexity, "scaling": draw_scaling}


def main(arguments):
    if len(arguments) < 3 or arguments[0] not in DRAW:
        sys.exit(__doc__)
    try:
        DRAW[arguments[0]](arguments[1], arguments[2:])
    except OSError as error:
        sys.exit(f"figures.py: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
