"""Tests examples/figures.py: PAPER_TXT=FILE python tests/test_figures.py [Reading | Drawing]

FILE is the output of examples/paper.c. Drawing needs matplotlib.
"""

import math
import os
import re
import subprocess
import sys
import unittest
from unittest import mock
from xml.etree import ElementTree

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
SCRIPT = os.path.join(ROOT, "examples", "figures.py")
BENCH = os.path.join(ROOT, "tests", "bench", "results", "2026-11-25-epyc-2-cores-plan.txt")
PAPER = os.environ["PAPER_TXT"]
sys.path.append(os.path.dirname(SCRIPT))
import figures  # noqa: E402
from scratch_case import ScratchCase  # noqa: E402

# What train_gpt and train_bert write: validations only at some steps.
GPT_LOG = ("step,loss,grad_norm,tokens_per_s,lr,val_loss\n"
           "1,5.5,1,100,0.1,\n2,3.25,1,100,0.1,2.5\n3,2.5,1,100,0.1,\n4,2.25,1,100,0.1,0\n")
BERT_LOG = "step,loss,lm_loss,val_lm_loss\n" + "".join(
    f"{step},9,{4 - step / 64},{3.5 if step % 20 == 0 else ''}\n" for step in range(1, 51))

PAPER_TABLE = """
Weak scaling: {title}
  model         GPUs  heads    s/step             %      paper     error
  GPT-2 1.2B   {n:>5d}     16     1.000    {first}      100.0         -
  GPT-2 2.5B   {m:>5d}     20     2.000    {second}       90.5    -1.6 %
"""
TITLES = "FLOP/s of a GPU in % of the 1.2B model on one", "the same with 64-way data parallel, batch 512"


def paper_text():
    """Two pages with the same tables and other numbers."""
    text = "what mt_plan_step predicts\n"
    strong = "\nStrong scaling: batch 8 on more GPUs (table 8)\n"
    for page, scale in (1, 1.0), (2, 0.5):
        text += f"\n==== page {page}: a machine ====\n"
        for i, title in enumerate(TITLES):
            text += PAPER_TABLE.format(title=title, n=1 + 63 * i, m=2 + 126 * i, first=scale * (100 - i),
                                       second=scale * (89 - i))
        text += strong + f"  GPT-2 1.2B       4     16     3.000     {3 * scale:.2f}       2.34   +28.2 %\n"
    return text


def bench_row(name, ranks, end=""):
    return f"{name}, TP={ranks}, 4 layers, hidden 256, 3.7M             119.5       105.2 -     140.2  ms{end}\n"


def efficiency(value, cores=2):
    return f"             {value}  efficiency on {cores} core{'s' if cores > 1 else ''}"


BENCH_TEXT = ("[scaling] tensor parallel GPTs\n" + bench_row("weak", 1) + bench_row("weak", 2, efficiency(0.911)) +
              bench_row("weak", "1 x DP=2", efficiency(0.8)) + bench_row("heads 16", 2, efficiency(0.7)) +
              bench_row("  predicted", 2, "             1.020  measured") + bench_row("strong", 1) +
              bench_row("strong", 2, efficiency(0.888)) + bench_row("weak", 1) +
              bench_row("weak", 4, efficiency(1.005)) + bench_row("strong", 1) +
              bench_row("strong", 4, efficiency(0.75)))


class Case(ScratchCase):

    def refuse(self, message, call, *arguments):
        with self.assertRaises(SystemExit) as caught:
            call(*arguments)
        self.assertIn(message, str(caught.exception))

    def refuse_endless(self):
        os.mkfifo(self.path("fifo"))
        with open(self.path("long"), "wb") as file:
            file.truncate(figures.FILE_MAX + 1)
        for call in figures.read_log, figures.read_paper, figures.read_bench:
            self.refuse("fifo is not a regular file", call, self.path("fifo"), "weak")
            self.refuse("/dev/zero is not a regular file", call, "/dev/zero", "weak")
        self.refuse("long has more than 268435456 bytes", figures.read_log, self.path("long"))


class Reading(Case):

    def test_logs(self):
        log = self.path("log.csv", GPT_LOG)
        self.assertEqual(figures.read_log(log), ([1, 2, 3, 4], [5.5, 3.25, 2.5, 2.25]))
        self.assertEqual(figures.read_log(log, "val_loss"), ([2, 4], [2.5, 0]))
        self.assertEqual(figures.read_perplexity(log), ([2, 4], [math.exp(2.5), 1]))
        self.assertEqual(figures.read_log(self.path("bert.csv", BERT_LOG), "val_lm_loss"), ([20, 40], [3.5, 3.5]))

    def test_numbers_that_are_not_finite(self):
        """A log of a run that has diverged has no figure."""
        for text in "nan", "-nan", "inf", "-inf":
            log = self.path("log.csv", GPT_LOG.replace("3.25,", f"{text},").replace("2.5\n", f"{text}\n"))
            self.refuse(f"log.csv: step 2: loss is {text}, must be a finite number", figures.read_log, log)
            self.refuse(f"log.csv: step 2: val_loss is {text}", figures.read_perplexity, log)
            table = self.path("paper.txt", paper_text().replace("    89.0 ", f"    {text} "))
            self.refuse(f"paper.txt: GPT-2 2.5B 2 is {text}", figures.read_paper, table, figures.MODEL_PARALLEL)
        log = self.path("log.csv", GPT_LOG.replace("2.5\n", "710\n"))
        self.refuse("step 2: val_loss 710 is too large for a perplexity", figures.read_perplexity, log)

    def test_labels(self):
        self.assertEqual(figures.split_label("2 layers, lr=1=a/b.csv"), ("2 layers, lr=1", "a/b.csv"))

    def test_paper(self):
        path = self.path("paper.txt", paper_text())
        self.assertEqual(figures.read_paper(path, figures.MODEL_PARALLEL), ({1: 100, 2: 89}, {1: 100, 2: 90.5}))
        self.assertEqual(figures.read_paper(path, figures.WITH_DATA_PARALLEL),
                         ({64: 99, 128: 88}, {64: 100, 128: 90.5}))
        self.assertEqual(figures.read_paper(path, figures.STRONG), ({4: 3}, {4: 2.34}))

    def test_paper_of_the_program(self):
        """Figure 5 and table 8 of the paper, and beside each number the prediction in the same line of page 1."""
        with open(PAPER) as file:
            page, = re.findall("==== page 1.*(?===== page 2)", file.read(), re.DOTALL)
        for title, digits, paper in ((figures.MODEL_PARALLEL, 1, {1: 100, 2: 95, 4: 82, 8: 77}),
                                     (figures.WITH_DATA_PARALLEL, 1, {64: 96, 128: 83, 256: 79, 512: 74}),
                                     (figures.STRONG, 2, {1: 1, 2: 1.64, 4: 2.34, 8: 2.98})):
            predicted, read = figures.read_paper(PAPER, title)
            self.assertEqual(read, paper)
            self.assertEqual(list(predicted), list(paper))
            table = page[page.index("\n" + title):]
            for n in paper:
                line = re.search(rf"^  GPT-2 \S+ +{n} .*$", table, re.MULTILINE)[0]
                self.assertRegex(line, f" {predicted[n]:.{digits}f} +{paper[n]:.{digits}f} ")

    def test_bench(self):
        path = self.path("bench.txt", BENCH_TEXT)
        self.assertEqual(figures.read_bench(path, "weak"), {1: (1, 1), 2: (2, 0.911), 4: (2, 1.005)})
        self.assertEqual(figures.read_bench(path, "strong"), {1: (1, 1), 2: (2, 0.888), 4: (2, 0.75)})

    def test_bench_with_other_numbers_of_cores(self):
        """Teams use as many cores as they have ranks, if there are so many."""
        text = BENCH_TEXT[:BENCH_TEXT.rindex("weak, TP=4")] + bench_row("weak", 4, efficiency(0.8, cores=4))
        path = self.path("bench.txt", text + bench_row("weak", 8, efficiency(0.7, cores=4)))
        self.assertEqual(figures.read_bench(path, "weak"), {1: (1, 1), 2: (2, 0.911), 4: (4, 0.8), 8: (4, 0.7)})
        path = self.path("bench.txt", bench_row("weak", 2, efficiency(0.9, cores=1)))
        self.assertEqual(figures.read_bench(path, "weak"), {1: (1, 1), 2: (1, 0.9)})

    def test_bench_of_the_results(self):
        self.assertEqual(figures.read_bench(BENCH, "weak"), {1: (1, 1), 2: (2, 0.911), 4: (2, 0.86), 8: (2, 0.955)})
        self.assertEqual(figures.read_bench(BENCH, "strong"),
                         {1: (1, 1), 2: (2, 0.888), 4: (2, 0.915), 8: (2, 0.77)})

    def test_bars_of_bench(self):
        """Ranks that share cores have bars of their own."""
        runs = {1: figures.Measured(1, 1), 4: figures.Measured(4, 0.5), 8: figures.Measured(4, 0.75)}
        own, shared = figures.bars_of_bench(runs, lambda run: run.efficiency * run.cores)
        self.assertEqual((own.heights, own.hatched), ({1: 1, 4: 2}, False))
        self.assertEqual((shared.heights, shared.hatched), ({8: 3}, True))
        self.assertIn("4 CPU cores", own.label)
        del runs[8]
        self.assertEqual(len(figures.bars_of_bench(runs, lambda run: run.cores)), 1)

    def test_refusals(self):
        log = self.path("log.csv", GPT_LOG)
        self.refuse("log.csv has no column lm_loss", figures.read_log, log, "lm_loss")
        self.refuse("log.csv has no values in column val_loss", figures.read_perplexity,
                    self.path("log.csv", GPT_LOG[:GPT_LOG.index("2,3.25")]))
        self.refuse("has no column loss", figures.read_log, self.path("empty.csv", ""))
        self.refuse_endless()
        self.refuse("log.csv: expected LABEL=LOG.csv", figures.split_label, log)
        one_page = self.path("paper.txt", paper_text().replace("page 1", "page 3"))
        self.refuse("paper.txt has no table Weak", figures.read_paper, one_page, figures.MODEL_PARALLEL)
        for text in "", BENCH_TEXT + BENCH_TEXT, BENCH_TEXT + bench_row("weak", 4, efficiency(0.9, cores=4)):
            self.refuse("expected the item scaling of one run", figures.read_bench, self.path("bench.txt", text),
                        "weak")
        self.refuse("Draws the figures", figures.main, [])
        self.refuse("scaling needs OUT.svg and at least one file", figures.main, ["scaling", "out.svg"])
        self.refuse("scaling needs two files, PAPER.txt and BENCH.txt, not 1", figures.main,
                    ["scaling", "out.svg", "one.txt"])
        self.refuse("'nonexistent' is none of the figures losses, ", figures.main, ["nonexistent", "out.svg", "a=b"])
        self.refuse("nonexistent.txt", figures.main, ["scaling", "out.svg", "a.txt", "nonexistent.txt"])
        with mock.patch.dict(sys.modules, {"matplotlib": None}):
            self.refuse("pip install matplotlib", figures.main, ["losses", "out.svg", "a=b"])


class Drawing(Case):

    def axes_of(self, *arguments):
        """The axes of the figure that a command would save."""
        with mock.patch.object(figures, "save") as save:
            figures.main([arguments[0], "out.svg", *arguments[1:]])
        (figure, out), _ = save.call_args
        self.assertEqual(out, "out.svg")
        return figure.axes

    def curves(self, *arguments):
        """The label, the steps and the values of each curve."""
        axes, = self.axes_of(*arguments)
        return [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]

    def test_losses(self):
        log = self.path("log.csv", GPT_LOG)
        steps = [1, 2, 3, 4], [5.5, 3.25, 2.5, 2.25]
        self.assertEqual(self.curves("losses", f"a={log}", f"b={log}"), [("a", *steps), ("b", *steps)])

    def test_placement(self):
        (label, steps, means), (_, *validations) = self.curves("placement", f"a={self.path('bert.csv', BERT_LOG)}")
        self.assertEqual((label, steps), ("a", [20, 40]))
        self.assertEqual(means, [4 - 10.5 / 64, 4 - 30.5 / 64])
        self.assertEqual(validations, [[20, 40], [3.5, 3.5]])

    def test_perplexity(self):
        log = self.path("log.csv", GPT_LOG)
        values = [2, 4], [math.exp(2.5), 1]
        self.assertEqual(self.curves("perplexity", f"a={log}", f"+b={log}"), [("a", *values), ("b", *values)])
        axes, = self.axes_of("perplexity", f"a={log}", f"+b={log}")
        model, split = axes.lines
        self.assertGreater(model.get_linewidth(), 2 * split.get_linewidth())

    def test_scaling(self):
        panels = self.axes_of("scaling", self.path("paper.txt", paper_text()), self.path("bench.txt", BENCH_TEXT))
        heights = [[[round(bar.get_height(), 6) for bar in bars] for bars in axes.containers] for axes in panels]
        self.assertEqual(heights, [[[100, 90.5], [100, 89]], [[100, 90.5], [99, 88]], [[100, 91.1], [100.5]],
                                   [[2.34], [3], [1, 1.776], [1.5]]])
        hatches = [[bars[0].get_hatch() for bars in axes.containers] for axes in panels]
        self.assertEqual(hatches, [[None, None], [None, None], [None, "////"], [None, None, None, "////"]])
        numbers = [[label.get_text() for label in axes.get_xticklabels()] for axes in panels]
        self.assertEqual(numbers, [["1", "2"], ["64", "128"], ["1", "2", "4"], ["1", "2", "4"]])
        places = [[[round(bar.get_center()[0]) for bar in bars] for bars in axes.containers] for axes in panels]
        self.assertEqual(places, [[[0, 1], [0, 1]], [[0, 1], [0, 1]], [[0, 1], [2]], [[2], [2], [0, 1], [2]]])
        legend = [text.get_text() for text in panels[0].figure.legends[0].get_texts()]
        self.assertEqual(legend, ["the paper, V100", "predicted, V100", "measured, 2 CPU cores",
                                  "measured, more ranks than the 2 cores"])

    def draw(self, *arguments):
        """Runs the script. Returns the file that it writes."""
        out = self.path("out.svg")
        subprocess.run([sys.executable, SCRIPT, arguments[0], out, *arguments[1:]], check=True)
        with open(out, "rb") as file:
            return file.read()

    def test_script(self):
        """The script writes small SVG files, and the same bytes in each run."""
        gpt, bert = self.path("gpt.csv", GPT_LOG), self.path("bert.csv", BERT_LOG)
        for arguments in (["losses", f"a={gpt}"], ["placement", f"a={bert}"],
                          ["perplexity", f"a={gpt}", f"+b={gpt}"], ["scaling", PAPER, BENCH]):
            with self.subTest(arguments[0]):
                drawn = self.draw(*arguments)
                self.assertEqual(ElementTree.fromstring(drawn).tag, "{http://www.w3.org/2000/svg}svg")
                self.assertLess(len(drawn), 100000)
        self.assertEqual(drawn, self.draw(*arguments))

    def test_endings(self):
        """The ending names the format, in small or capital letters. Without one, the file is SVG."""
        log = self.path("gpt.csv", GPT_LOG)
        for name, begin in (("out.png", b"\x89PNG"), ("out.PNG", b"\x89PNG"), ("out.SVG", b"<?xml"),
                            ("out.pdf", b"%PDF"), ("out.Pdf", b"%PDF"), ("out.JPG", b"\xff\xd8"), ("out", b"<?xml")):
            figures.main(["losses", self.path(name), f"a={log}"])
            with open(self.path(name), "rb") as file:
                self.assertEqual(file.read(len(begin)), begin)

    def test_outputs(self):
        """A pipe without a reader is not waited for, and a file that is no figure is not overwritten."""
        log = self.path("gpt.csv", GPT_LOG)
        os.mkfifo(self.path("fifo"))
        for out, sentence in (("fifo", "No such device or address"), ("gpt.csv", "cannot be written as .csv")):
            done = subprocess.run([sys.executable, SCRIPT, "losses", self.path(out), f"a={log}"], capture_output=True)
            self.assertEqual(done.returncode, 1)
            self.assertIn(sentence, done.stderr.decode())
            self.assertEqual(done.stderr.count(b"\n"), 1)
        with open(log, encoding="utf-8") as file:
            self.assertEqual(file.read(), GPT_LOG)


if __name__ == "__main__":
    unittest.main()
