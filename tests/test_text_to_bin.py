"""Tests examples/text_to_bin.py: python tests/test_text_to_bin.py [Plain | Tokenizers]

Plain needs no packages. Tokenizers needs the package tokenizers of PyPI.
"""

import contextlib
import faulthandler
import io
import json
import os
import random
import re
import struct
import sys
import unittest
from unittest import mock

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples"))
import text_to_bin  # noqa: E402
from scratch_case import ScratchCase  # noqa: E402

# What each rule does to a text.
RULES = {
    "possessive": ("two dogs ' bone", "two dogs' bone"),
    "hyphen": ("well @-@ known", "well-known"),
    "comma in a number": ("213 @,@ 886 words", "213,886 words"),
    "point in a number": ("3 @.@ 5 km", "3.5 km"),
    "colon": ("so : yes", "so: yes"),
    "semicolon": ("so ; yes", "so; yes"),
    "full stop": ("the end . Then", "the end. Then"),
    "exclamation mark": ("stop ! Then", "stop! Then"),
    "question mark": ("who ? Then", "who? Then"),
    "comma": ("one , two", "one, two"),
    "parentheses": ("a ( b c ) d ( e ) f", "a (b c) d (e) f"),
    "brackets": ("a [ b c ] d", "a [b c] d"),
    "braces": ("a { b c } d", "a {b c} d"),
    "double quotes": ('a " b c " d " e " f', 'a "b c" d "e" f'),
    "single quotes": ("a ' b c ' d", "a 'b c' d"),
    "heading of level 4": ("= = = = = Name", "===== Name"),  # the next two rules also join four
    "heading of level 3": ("= = = Name = = =", "=== Name ==="),
    "heading of level 2": ("= = Name = =", "== Name =="),
    "degree": ("20 \u00b0 C", "20\u00b0C"),
    "end of a line": ("one \ntwo", "one\ntwo"),
    "start of a line": ("one\n two", "one\ntwo"),
    "number of the Penn Treebank": ("in N days", "in 1 days"),
    "contraction": ("the dog 's bone", "the dog's bone"),
}

# Of the rules for what is in brackets and in quotes, the patterns of Megatron-LM, which take the cube of the length of
# some texts.
PATTERNS = {
    "parentheses": (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    "brackets": (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    "braces": (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
    "double quotes": (r'"\s*([^"]*?)\s*"', r'"\1"'),
    "single quotes": (r"'\s*([^']*?)\s*'", r"'\1'"),
}

WIKITEXT = (" \n = Otto = \n \n Otto ( born 1 @,@ 000 BC ) was a well @-@ known \" <unk> \" ; he said : no . \n"
            " = = Life = = \n \n Otto 's house , at 3 @.@ 5 ° C , was cold ! \n")
DETOKENISED = ("\n= Otto =\n\nOtto (born 1,000 BC) was a well-known \"<unk>\"; he said: no.\n"
               "== Life ==\n\nOtto's house, at 3.5°C, was cold!\n")


def read_bin(path):
    with open(path, "rb") as file:
        data = file.read()
    header = struct.unpack("<256i", data[:1024])
    assert header[:2] == (20240520, 1) and not any(header[10 if header[5] else 5:])
    count, words, passages = header[2:5]
    assert len(data) == 1024 + 2 * count + 8 * passages + header[5] * count
    tokens = list(struct.unpack(f"<{count}H", data[1024:1024 + 2 * count]))
    numbers = struct.unpack(f"<{2 * passages}i", data[1024 + 2 * count:1024 + 2 * count + 8 * passages])
    return tokens, words, list(zip(numbers[::2], numbers[1::2]))


def read_marks(path):
    """The special tokens, and the marks of the tokens."""
    with open(path, "rb") as file:
        data = file.read()
    header = struct.unpack("<256i", data[:1024])
    assert header[5] == 1 and header[3:5] == (0, 0)
    return header[6:10], list(data[1024 + 2 * header[2]:])


class Case(ScratchCase):

    def run_main(self, *arguments):
        """The exit status, and what was printed to stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = text_to_bin.main(list(arguments))
            except SystemExit as end:
                status = end.code
        return status, out.getvalue(), err.getvalue()

    def make(self, task, *arguments, tokenizer="bytes"):
        status, _, err = self.run_main(task, "--tokenizer", tokenizer, "--out", self.path("out.bin"), *arguments)
        self.assertEqual((status, err), (0, ""))
        return read_bin(self.path("out.bin"))

    def refuse(self, sentence, task, *arguments, tokenizer="bytes"):
        status, _, err = self.run_main(task, "--tokenizer", tokenizer, "--out", self.path("out.bin"), *arguments)
        self.assertNotEqual(status, 0)
        self.assertIn(sentence, err)
        self.assertEqual(err.count("\n"), 1)

    def refuse_endless(self):
        """What is no file of a known size, and a file that is too long, are refused before they fill the memory."""
        os.mkfifo(self.path("fifo"))
        self.refuse("fifo is not a regular file", "train", self.path("fifo"))
        self.refuse("/dev/zero is not a regular file", "train", "/dev/zero")
        self.refuse("Is a directory", "train", self.folder)
        self.refuse("/proc/self/status has more than the 0 bytes of its size", "train", "/proc/self/status")
        with open(self.path("long"), "wb") as file:
            file.truncate(text_to_bin.TEXT_MAX + 1)
        self.refuse("has 8589934593 bytes, must have at most 8589934592", "train", self.path("long"))


class Plain(Case):

    def test_outputs(self):
        """A pipe without a reader is not waited for, one with a reader gets the bytes, and no input is overwritten."""
        text = self.path("a.txt", "a text")
        os.mkfifo(self.path("fifo"))
        os.symlink(text, self.path("link"))
        for out, sentence in (("fifo", "No such device or address"), ("", "Is a directory"),
                              ("a.txt", "a.txt is the same file as"), ("link", "link is the same file as")):
            status, _, err = self.run_main("train", "--tokenizer", "bytes", "--out", self.path(out), text)
            self.assertEqual(status, 1)
            self.assertIn(sentence, err)
        with open(text, encoding="utf-8") as file:
            self.assertEqual(file.read(), "a text")
        reader, writer = os.pipe()
        status, _, err = self.run_main("train", "--tokenizer", "bytes", "--out", f"/dev/fd/{writer}", text)
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(len(os.read(reader, 4096)), 1024 + 2 * len("a text"))
        os.close(reader)
        os.close(writer)

    def test_outputs_that_are_the_tokenizer(self):
        """No file of a tokenizer is overwritten: by its path in a folder, by a link, or as --tokenizer itself."""
        text, folder, link = self.path("a.txt", "a text"), self.path("folder"), self.path("link")
        os.mkdir(folder)
        files = [self.path(os.path.join(folder, name), "a tokenizer")
                 for name in ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")]
        for file in files:
            os.symlink(file, link)
            for out, tokenizer in (file, folder), (link, folder), (file, file):
                status, _, err = self.run_main("train", "--tokenizer", tokenizer, "--out", out, text)
                self.assertEqual((status, err), (1, f"text_to_bin: --out {out} is the same file as {file}\n"))
            os.remove(link)
        for file in files:
            with open(file, encoding="utf-8") as content:
                self.assertEqual(content.read(), "a tokenizer")

    def test_an_output_with_the_name_of_a_tokenizer(self):
        """The tokenizer "bytes" is no file."""
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)
        for _ in range(2):
            status, _, err = self.run_main("train", "--tokenizer", "bytes", "--out", "bytes", self.path("a.txt", "a"))
            self.assertEqual((status, err), (0, ""))

    def test_each_rule(self):
        self.assertEqual([name for name, _, _ in text_to_bin.WIKITEXT_RULES], list(RULES))
        for name, (before, after) in RULES.items():
            without = before
            for other, pattern, replacement in text_to_bin.WIKITEXT_RULES:
                if other != name:
                    without = re.sub(pattern, replacement, without)
            with self.subTest(name):
                self.assertEqual(text_to_bin.detokenise_wikitext(before), after)
                self.assertNotEqual(without, after)

    def test_rules_are_those_of_megatron(self):
        draw = random.Random(5)
        for _ in range(3000):
            text = want = "".join(draw.choice("\"\"'()[]{}\n\u2003  ab=s@-.,") for _ in range(draw.randrange(40)))
            for name, pattern, replacement in text_to_bin.WIKITEXT_RULES:
                pattern, replacement = PATTERNS.get(name, (pattern, replacement))
                want = re.sub(pattern, replacement, want)
            self.assertEqual(text_to_bin.detokenise_wikitext(text), want, repr(text))

    def test_rules_are_linear(self):
        """With the square of the length, each of these texts takes hours. A hang ends the test."""
        n = 1000000
        faulthandler.dump_traceback_later(600, exit=True)
        for mark in "\"'()[]{}@:=.\n ":
            for text in mark + " " * n, mark * n, (mark + " ") * n, (" " + mark) * n, mark + "a" * n + " " * n:
                text_to_bin.detokenise_wikitext(text)
        faulthandler.cancel_dump_traceback_later()
        self.assertEqual(text_to_bin.detokenise_wikitext('"' + " " * n), '"' + " " * n)
        self.assertEqual(text_to_bin.detokenise_wikitext('"' + " " * n + 'a"'), '"a"')
        self.assertEqual(text_to_bin.detokenise_wikitext("(" * n + " )"), "(" * n + ")")

    def test_wikitext(self):
        text = self.path("wiki.txt", WIKITEXT)
        tokens, words, passages = self.make("wikitext", text)
        self.assertEqual(bytes(tokens).decode(), DETOKENISED)
        self.assertEqual((words, passages), (len(WIKITEXT.strip().split(" ")), []))
        tokens, words, _ = self.make("wikitext", "--keep", text)
        self.assertEqual(bytes(tokens).decode(), WIKITEXT)
        self.assertEqual(words, len(WIKITEXT.strip().split(" ")))

    def test_count_words(self):
        for text in "one", "a b", "a  b", " \n = A b = \n \n c \n", "a\nb c\n", "a\tb", "  a   b ":
            self.assertEqual(text_to_bin.count_words(text), len(text.strip().split(" ")), text)
        self.assertEqual(text_to_bin.count_words(" \n"), 0)

    def test_train(self):
        one, two = self.path("one", "ab\r\n"), self.path("two", "\u00e4")
        self.assertEqual(self.make("train", one, two), ([97, 98, 13, 10, 195, 164], 0, []))
        self.assertEqual(self.make("train", "--separator", "50256", one, two)[0],
                         [50256, 97, 98, 13, 10, 50256, 195, 164])

    def test_bert(self):
        one, two = self.path("one", " A b2. C-d\n\n.e\n"), self.path("two", "\u00e4x 3.5")
        tokens, words, passages = self.make("bert", one, two)
        self.assertEqual((bytes(tokens).decode(), words, passages), ("A b2.C-d.e\u00e4x 3.5", 0, []))
        special, marks = read_marks(self.path("out.bin"))
        self.assertEqual(special, (256, 257, 258, 259))
        self.assertEqual("".join(map(str, marks)), "31101" + "311" + "31" + "3001111")
        self.refuse("the texts have no tokens", "bert", self.path("blank", " \n "))

    def test_lambada(self):
        lines = [{"text": "One, two\nthree four. "}, {"context": "Who is ", "continuation": " Otto"},
                 {"text": " a man to man"}]
        text = self.path("l.jsonl", "\n".join(json.dumps(line) for line in lines) + "\n\n")
        tokens, words, passages = self.make("lambada", text)
        self.assertEqual(bytes(tokens), b"One, two\nthree four." + b"Who is Otto" + b"a man to man")
        self.assertEqual((words, passages), (0, [(20, 6), (11, 5), (12, 4)]))

    def test_json_that_is_no_passage(self):
        text = "must be a text"
        for line, sentence in [
            ('{"text": null}', '"text" is null, ' + text), ('{"text": 5}', '"text" is 5, ' + text),
            ('{"text": ["a b"]}', '"text" is ["a b"], ' + text), ('{"text": {"a": "b"}}', text),
            ('{"text": true}', '"text" is true, ' + text), ('{"text": NaN}', '"text" is NaN, ' + text),
            ('{"context": 1, "continuation": "a"}', '"context" is 1, ' + text),
            ('{"context": "a b", "continuation": null}', '"continuation" is null, ' + text),
            ('{"text": "a \\ud800 b"}', '"text" has half a surrogate pair, \\ud800, as its character 3'),
            ('{"text": "a b\\udfff"}', '"text" has half a surrogate pair, \\udfff, as its character 4'),
            ('{"context": "\\udc00a", "continuation": "b"}', '"context" has half a surrogate pair'),
            ('{"context": "a", "continuation": "\\ud83d"}', '"continuation" has half a surrogate pair'),
            ('{"context": "a"}', 'neither "text", nor "context" and "continuation"'),
            ('{"text": "a b", "context": "a", "continuation": "b"}', '"text" as well as "context"'),
            ('{"text": "a b", "text": "a c"}', "an object has a member twice"),
            ('{"text": ""}', "a passage of less than two words"), ('{"text": " \u2003 "}', "less than two words"),
            ('{"context": "", "continuation": "a"}', "less than two words"),
            ("5", "neither"), ("null", "neither"), ('"a b"', "neither"), ("[" * 100000, "no JSON"),
            ('{"text": ' + "9" * 5000 + "}", ""), ("\ufeff{}", "no JSON"), ("{'text': 'a b'}", "no JSON"),
            ('{"text": "a\tb"}', "no JSON"), ('{"text": "a \\x b"}', "no JSON")]:
            with self.subTest(line[:60]):
                path = self.path("l.jsonl", '{"text": "a b"}\n\n' + line + '\n{"text": "a b"}\n')
                self.refuse(f"{path}, line 3: ", "lambada", path)
                self.refuse(sentence, "lambada", path)
        pair = self.path("l.jsonl", '{"text": "a \\ud83d\\ude00"}\n')
        self.assertEqual(bytes(self.make("lambada", pair)[0]).decode(), "a \U0001f600")

    def test_a_tokenizer_that_is_no_file(self):
        text = self.path("text", "a b")
        os.mkfifo(self.path("tokenizer.json"))
        faulthandler.dump_traceback_later(600, exit=True)
        self.refuse("tokenizer.json: no file", "train", text, tokenizer=self.path("tokenizer.json"))
        self.refuse("tokenizer.json: no file", "train", text, tokenizer=self.folder)
        faulthandler.cancel_dump_traceback_later()

    def test_refusals(self):
        text = self.path("text", "a b")
        self.refuse("nonexistent", "train", "nonexistent")
        self.refuse("--separator 65536: expected a token from 0 to 65535", "train", "--separator", "65536", text)
        self.refuse("has no words", "wikitext", self.path("blank", " \n "))
        self.refuse("has no passages", "lambada", self.path("empty", "\n"))
        self.refuse("line 2: no JSON", "lambada", self.path("bad", '{"text": "a b"}\n{"text"\n'))
        self.refuse('line 1: neither "text", nor "context" and "continuation"', "lambada", self.path("bad", "[1]"))
        self.refuse("line 1: a passage of less than two words", "lambada", self.path("bad", '{"text": "one"}'))
        self.refuse("--tokenizer nonexistent: no such file", "train", text, tokenizer="nonexistent")
        self.refuse("has no tokenizer.json, no vocab.json with merges.txt, and no vocab.txt", "train", text,
                    tokenizer=self.folder)
        with open(self.path("latin"), "wb") as file:
            file.write(b"\xe4")
        self.refuse("is not UTF-8", "train", self.path("latin"))
        self.refuse_endless()
        with mock.patch.dict(sys.modules, {"tokenizers": None}):
            self.refuse("the package tokenizers is missing: pip install tokenizers", "train", text, tokenizer=text)
        with self.assertRaisesRegex(text_to_bin.Problem, "token 65536 does not fit into 16 bits"):
            text_to_bin.write_bin(self.path("out.bin"), [65536])


class Tokenizers(Case):

    def gpt2_folder(self):
        """A small byte-level BPE, as the files of GPT-2."""
        import tokenizers
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.train([self.path("corpus", "the cat and the dog and the cat. " * 50)], vocab_size=280)
        folder = self.path("gpt2")
        os.mkdir(folder)
        tokenizer.save_model(folder)
        tokenizer.save(self.path("tokenizer.json"))
        return folder, tokenizer

    def test_bpe_and_json(self):
        folder, tokenizer = self.gpt2_folder()
        text = self.path("text", " the cat\u00e9\n\nand dogs")
        tokens, _, _ = self.make("train", text, tokenizer=folder)
        self.assertEqual(tokenizer.decode(tokens), " the cat\u00e9\n\nand dogs")
        self.assertLess(len(tokens), 15)  # of 20 bytes: some are merged
        self.assertEqual(self.make("train", text, tokenizer=self.path("tokenizer.json"))[0], tokens)

    def test_last_word_has_its_space(self):
        folder, tokenizer = self.gpt2_folder()
        text = self.path("l.jsonl", '{"text": "the dog and the cat"}\n')
        tokens, _, passages = self.make("lambada", text, tokenizer=folder)
        (count, answer), = passages
        self.assertEqual(tokenizer.decode(tokens[:count - answer]), "the dog and the")
        self.assertEqual(tokenizer.decode(tokens[count - answer:]), " cat")

    def trained(self, model, trainer, **parts):
        """A tokenizer that has words of a corpus as tokens. No token has parts of two words."""
        import tokenizers
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_next")
        for name, part in parts.items():
            setattr(tokenizer, name, part)
        corpus = "the cat and the dog and the bird. Sarah saw the bird. the bird saw the dog and the cat. ".split(" ")
        tokenizer.train_from_iterator([" ".join(corpus[i:i + n]) for n in (1, 2) for i in range(len(corpus))] * 9,
                                      trainer)
        if "pre_tokenizer" not in parts:
            tokenizer.pre_tokenizer = None
        tokenizer.save(self.path("tokenizer.json"))
        return tokenizer

    def last_words(self, tokenizer, *passages):
        """The tokens of the last word of each passage. They and those of the context are the tokens of the passage."""
        lines = [json.dumps({"text": passage}) for passage in passages]
        tokens, _, counts = self.make("lambada", self.path("l.jsonl", "\n".join(lines)),
                                      tokenizer=self.path("tokenizer.json"))
        lasts = []
        for passage, (count, answer) in zip(passages, counts):
            self.assertEqual(tokens[:count], tokenizer.encode(passage, add_special_tokens=False).ids)
            lasts.append([tokenizer.id_to_token(token) for token in tokens[count - answer:count]])
            tokens = tokens[count:]
        self.assertEqual(tokens, [])
        return lasts

    def test_the_last_word_is_that_of_the_passage(self):
        """Whatever a tokenizer puts in front of a text, the last word has the tokens that it has in the passage."""
        import tokenizers
        from tokenizers import models, normalizers, pre_tokenizers, trainers
        space = "\u2581"
        llama = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        kinds = {
            "Prepend, as Llama 2, TinyLlama and Phi-3": {"normalizer": llama},
            "Prepend, split": {"normalizer": llama, "pre_tokenizer": pre_tokenizers.Split(space, "merged_with_next")},
            "ByteLevel with a space": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
            "ByteLevel": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)},
            "ByteLevel, offsets with spaces": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True,
                                                                                         trim_offsets=False)}}
        for scheme in "first", "always", "never":
            kinds["Metaspace, " + scheme] = {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme=scheme)}
        for name, parts in kinds.items():
            mark = "\u0120" if "ByteLevel" in name else space
            for model in "BPE", "Unigram":
                with self.subTest(name + ", " + model):
                    alphabet = pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in name else [space]
                    if model == "BPE":
                        tokenizer = self.trained(models.BPE(), trainers.BpeTrainer(
                            vocab_size=400, show_progress=False, initial_alphabet=alphabet), **parts)
                    else:
                        tokenizer = self.trained(models.Unigram(), trainers.UnigramTrainer(
                            vocab_size=400, show_progress=False, initial_alphabet=alphabet, unk_token="<unk>",
                            special_tokens=["<unk>"]), **parts)
                    lasts = self.last_words(tokenizer, "the cat saw the dog", "and the bird saw Sarah", "Sarah saw the")
                    for word, last in zip(("dog", "Sarah", "the"), lasts):
                        self.assertEqual("".join(last), mark + word)
                    if model == "BPE":
                        self.assertEqual([len(last) for last in lasts], [1, 1, 1])

    def test_a_context_whose_tokens_change(self):
        """Its tokens are then those in the passage, unless one of them belongs to the last word, too."""
        import tokenizers
        from tokenizers import models, pre_tokenizers
        vocab = {"a": 0, "b": 1, "c": 2, " ": 3, "ab": 4, " c": 5, "b ": 6}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), (" ", "c")]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("b(?= )"), "isolated")
        tokenizer.save(self.path("tokenizer.json"))
        self.assertEqual(tokenizer.encode("ab").ids, [4])
        self.assertEqual(self.last_words(tokenizer, "ab c", "ab c cc"), [[" c"], [" c", "c"]])
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("b", " ")]))
        tokenizer.save(self.path("tokenizer.json"))
        path = self.path("l.jsonl", '{"text": "a c"}\n{"text": "ab c"}\n')
        self.refuse("line 2: a token belongs to the context and to the last word", "lambada", path,
                    tokenizer=self.path("tokenizer.json"))

    def test_a_tokenizer_that_refuses_a_text(self):
        import tokenizers
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]")).save(self.path("tokenizer.json"))
        path = self.path("text", "b b")
        for task in "train", "wikitext":
            self.refuse("text: the tokenizer refuses it", task, path, tokenizer=self.path("tokenizer.json"))
        path = self.path("l.jsonl", '{"text": "b b"}\n')
        self.refuse("line 1: the tokenizer refuses it", "lambada", path, tokenizer=self.path("tokenizer.json"))

    def test_wordpiece(self):
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "The", "."]
        vocab = self.path("vocab.txt", "\n".join(words) + "\n")
        text = self.path("text", "The cats.")
        self.assertEqual(self.make("train", text, tokenizer=vocab)[0], [5, 6, 7, 9])
        self.assertEqual(self.make("train", "--cased", text, tokenizer=vocab)[0], [8, 6, 7, 9])
        self.assertEqual(self.make("train", text, tokenizer=self.folder)[0], [5, 6, 7, 9])
        text = self.path("text", "The cats. The\ncat")
        self.assertEqual(self.make("bert", text, tokenizer=vocab)[0], [5, 6, 7, 9, 5, 6])
        self.assertEqual(read_marks(self.path("out.bin")), ((0, 2, 3, 4), [3, 1, 0, 1, 3, 3]))

    def test_refusals(self):
        text = self.path("text", "a b")
        self.refuse("text.json", "train", text, tokenizer=self.path("text.json", "no tokenizer"))
        folder, _ = self.gpt2_folder()
        self.refuse("the tokenizer has no [PAD]", "bert", text, tokenizer=folder)


if __name__ == "__main__":
    unittest.main()
