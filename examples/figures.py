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

scaling: weak scaling in % and the speed-up of strong scaling, as in figure 5 and table 8 of arXiv 1909.08053. PAPER.txt
is the output of examples/paper.c, which has the numbers of the paper and the predictions. BENCH.txt is the output of
tests/bench/bench.c, with the item scaling. Hatched bars have more ranks than cores.
docs/paper.md, "Weak scaling", has the commands that made docs/scaling.svg.
"""
import csv
import io
import math
import os
import re
import stat
import sys
from typing import NamedTuple

FILE_MAX = 1 << 28  # bytes of a log
MEAN_OF = 20
MODEL_PARALLEL = "Weak scaling: FLOP/s of a GPU"  # the beginnings of the titles of tables
WITH_DATA_PARALLEL = "Weak scaling: the same with 64-way data parallel"
STRONG = "Strong scaling"

# ---- reading; needs no packages --------------------------------------------------------------------------------------


def split_label(argument):
    label, equals, path = argument.rpartition("=")
    if not equals:
        sys.exit(f"figures.py: {argument}: expected LABEL=LOG.csv")
    return label, path


def read_number(path, what, text):
    number = float(text)
    if not math.isfinite(number):
        sys.exit(f"figures.py: {path}: {what} is {text}, must be a finite number")
    return number


def read_text(path):
    """The text of a regular file. A pipe without a writer, a device and a file that is too long are refused."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            sys.exit(f"figures.py: {path} is not a regular file")
        content = file.read(FILE_MAX + 1)
    if len(content) > FILE_MAX:
        sys.exit(f"figures.py: {path} has more than {FILE_MAX} bytes")
    return content.decode("utf-8", "replace").replace("\r\n", "\n")


def open_output(path):
    """A file to write, also /dev/fd/N or a pipe with a reader. A pipe without one is an error, and not waited for."""
    file = open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))
    os.set_blocking(file.fileno(), True)
    if stat.S_ISBLK(os.fstat(file.fileno()).st_mode):
        sys.exit(f"figures.py: {path} is a block device")
    return file


def read_log(path, column="loss"):
    """The steps and the values of a column, without the steps that have no value."""
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    if column not in (reader.fieldnames or []):
        sys.exit(f"figures.py: {path} has no column {column}")
    rows = [row for row in reader if row[column]]
    if not rows:
        sys.exit(f"figures.py: {path} has no values in column {column}")
    return ([int(row["step"]) for row in rows],
            [read_number(path, f"step {row['step']}: {column}", row[column]) for row in rows])


def read_perplexity(path):
    steps, losses = read_log(path, "val_loss")
    for step, loss in zip(steps, losses):
        if loss > math.log(sys.float_info.max):
            sys.exit(f"figures.py: {path}: step {step}: val_loss {loss:g} is too large for a perplexity")
    return steps, [math.exp(loss) for loss in losses]


def read_paper(path, title):
    """A table of page 1 of the output of examples/paper.c: by numbers of GPUs, the predictions and the paper's
    numbers."""
    page = read_text(path).partition("==== page 1")[2].partition("==== page 2")[0]
    table = page.partition("\n" + title)[2].partition("\n\n")[0]
    rows = [line.split() for line in table.splitlines() if line.startswith("  GPT-2 ")]
    if not rows:
        sys.exit(f"figures.py: {path} has no table {title}")
    predicted, paper = ({int(row[2]): read_number(path, " ".join(row[:3]), row[i]) for row in rows} for i in (5, 6))
    return predicted, paper


class Measured(NamedTuple):
    cores: int  # how many cores the ranks used: at most one for each rank
    efficiency: float  # compared with one rank; 1: as many times faster as there are cores


def read_bench(path, kind):
    """The tensor parallel rows of a kind, "weak" or "strong", in the output of the benchmark, by numbers of ranks. One
    rank has the efficiency 1 by definition."""
    rows = re.findall(rf"^{kind}, TP=(\d+),.* ([0-9.]+)  efficiency on (\d+) cores?$", read_text(path), re.MULTILINE)
    runs = {int(ranks): Measured(int(cores), float(efficiency)) for ranks, efficiency, cores in rows}
    if not rows or len(runs) < len(rows):
        sys.exit(f"figures.py: {path}: expected the item scaling of one run of the benchmark")
    return {1: Measured(1, 1.0), **runs}


# ---- drawing ---------------------------------------------------------------------------------------------------------


def make_figure(rows=1, columns=1, **options):
    """A figure and its axes. Each row is 3 inches high."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("figures.py: the package matplotlib is missing: pip install matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "megatron.h"  # the same bytes in every run
    import matplotlib.pyplot as plt
    return plt.subplots(rows, columns, figsize=(7, 3 * rows), **options)


def save(figure, out):
    from matplotlib.backend_bases import FigureCanvasBase
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    kind = os.path.splitext(out)[1][1:].lower() or "svg"
    if kind not in FigureCanvasBase.get_supported_filetypes():  # that of SVG has its own types only
        sys.exit(f"figures.py: {out}: a figure cannot be written as .{kind}")
    undated = {"metadata": {"Date": None}} if kind in ("svg", "svgz") else {}  # no date: the same bytes in every run
    with open_output(out) as file:
        figure.savefig(file, format=kind, bbox_inches="tight", **undated)


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


class Bars(NamedTuple):
    """Bars of one kind."""
    label: str
    colour: str
    heights: dict  # by numbers of GPUs or ranks
    hatched: bool = False


def draw_bars(axes, kinds, digits=0):
    """For each number of GPUs or ranks, the bars of the kinds that have it, side by side, with their heights above."""
    numbers = sorted({n for kind in kinds for n in kind.heights})
    beside = {n: [kind for kind in kinds if n in kind.heights] for n in numbers}
    width = 0.8 / max(len(group) for group in beside.values())
    for kind in kinds:
        own = [n for n in numbers if n in kind.heights]
        places = [numbers.index(n) + (beside[n].index(kind) - (len(beside[n]) - 1) / 2) * width for n in own]
        style = {"facecolor": "none", "hatch": "////"} if kind.hatched else {"facecolor": kind.colour}
        bars = axes.bar(places, [kind.heights[n] for n in own], width * 0.92, label=kind.label,
                        edgecolor=kind.colour, linewidth=0.6, **style)
        axes.bar_label(bars, [f"{kind.heights[n]:.{digits}f}" for n in own], fontsize=6.5, padding=1)
    axes.set_xticks(range(len(numbers)), [str(n) for n in numbers])


def bars_of_paper(path, title):
    predicted, paper = read_paper(path, title)
    return [Bars("the paper, V100", "tab:gray", paper), Bars("predicted, V100", "tab:blue", predicted)]


def bars_of_bench(runs, height):
    """The bars of ranks with a core each, and those of ranks that share cores, if there are any. height gives that of a
    run."""
    most = max(run.cores for run in runs.values())
    own = {n: height(run) for n, run in runs.items() if n <= run.cores}
    shared = {n: height(run) for n, run in runs.items() if n > run.cores}
    core = "core" if most == 1 else "cores"
    bars = [Bars(f"measured, {most} CPU {core}", "tab:orange", own)]
    return bars + [Bars(f"measured, more ranks than the {most} {core}", "tab:orange", shared, True)] if shared else bars


def draw_scaling(out, files):
    if len(files) != 2:
        sys.exit(f"figures.py: scaling needs two files, PAPER.txt and BENCH.txt, not {len(files)}")
    paper, bench = files
    weak, strong = read_bench(bench, "weak"), read_bench(bench, "strong")
    figure, ((left, right), (below, speed_ups)) = make_figure(2, 2, gridspec_kw={"hspace": 0.5, "wspace": 0.25})
    draw_bars(left, bars_of_paper(paper, MODEL_PARALLEL))
    draw_bars(right, bars_of_paper(paper, WITH_DATA_PARALLEL))
    draw_bars(below, bars_of_bench(weak, lambda run: 100 * run.efficiency))
    draw_bars(speed_ups, bars_of_paper(paper, STRONG) +
              bars_of_bench(strong, lambda run: run.efficiency * run.cores), digits=1)
    for axes, title, numbers, heights in (
            (left, "Weak scaling, model parallel", "GPUs", "FLOP/s of each GPU, %"),
            (right, "Weak scaling, model and data parallel", "GPUs", "FLOP/s of each GPU, %"),
            (below, "Weak scaling on a CPU, small GPTs", "ranks", "FLOP/s of each core, %"),
            (speed_ups, "Strong scaling", "GPUs or ranks", "speed-up")):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(numbers, fontsize=9)
        axes.set_ylabel(heights, fontsize=9)
    figure.legend(*speed_ups.get_legend_handles_labels(), loc="lower center", bbox_to_anchor=(0.5, 0.93), ncols=2,
                  frameon=False, fontsize=8)
    save(figure, out)


DRAW = {"losses": draw_losses, "placement": draw_placement, "perplexity": draw_perplexity, "scaling": draw_scaling}


class Misuse(SystemExit):
    """Arguments that the script does not have. Its status is then 2."""


def main(arguments):
    if "--help" in arguments or "-h" in arguments:
        print("usage: figures.py FIGURE OUT.svg FILE [FILE ...]\n\n" + __doc__)
        return
    if not arguments:
        raise Misuse(__doc__)
    if arguments[0] not in DRAW:
        raise Misuse(f"figures.py: '{arguments[0]}' is none of the figures {', '.join(DRAW)}, see --help")
    if len(arguments) < 3:
        raise Misuse(f"figures.py: {arguments[0]} needs OUT.svg and at least one file")
    try:
        DRAW[arguments[0]](arguments[1], arguments[2:])
    except OSError as error:
        sys.exit(f"figures.py: {error}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Misuse as misuse:
        print(misuse, file=sys.stderr)
        sys.exit(2)
