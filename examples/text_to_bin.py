#!/usr/bin/env python3
"""Makes token files for train_gpt, train_bert and eval_gpt from text.

    python3 examples/text_to_bin.py train    --tokenizer gpt2 --out train.bin TEXT [TEXT ...]
    python3 examples/text_to_bin.py bert     --tokenizer vocab.txt --out bert.bin TEXT [TEXT ...]
    python3 examples/text_to_bin.py wikitext --tokenizer gpt2 --out wikitext.bin wiki.test.tokens
    python3 examples/text_to_bin.py lambada  --tokenizer gpt2 --out lambada.bin lambada_test.jsonl

--tokenizer: "bytes" (a token is a byte), a tokenizer.json of Hugging Face, a vocab.txt of BERT (WordPiece), or a
directory with tokenizer.json, with vocab.json and merges.txt (GPT-2's BPE), or with vocab.txt. All of them except
"bytes" need the package tokenizers of PyPI. No token is added to a text.

train      The texts, one after the other. --separator ID puts this token in front of each text.
bert       The texts, one after the other, with marks of sentences and words, and with the tokenizer's numbers of [PAD],
           [CLS], [SEP] and [MASK]. A sentence ends at a new line, or at a full stop with white space behind it. Words
           are those of the tokenizer; with "bytes", which has the special tokens 256 to 259, a run of letters and
           digits, or any other byte.
wikitext   A text of WikiText, detokenised by the rules of Megatron-LM, with the number of words of the original, which
           eval_gpt needs for the perplexity per word: the parts between single spaces. --keep leaves the text as it is.
lambada    Each line is {"text": ...}, or {"context": ..., "continuation": ...}. The last word of a passage is what
           follows its last white space. The text before it, without white space at both ends, a space and the last
           word become tokens together, because some tokenizers begin each text with a space. A line with a token of
           which a part is in the last word is refused.

The file is that of llm.c: 256 int32, then uint16 tokens, all little-endian. The header has the number 20240520, the
version 1, the number of tokens, the number of words of the original text (0: unknown) and the number of passages (0: a
text). With passages, two int32 for each of them follow the tokens: the tokens of the passage, and how many of them, at
its end, are its last word. In a file for train_bert the next numbers are 1 and the special tokens [PAD], [CLS], [SEP]
and [MASK], and a byte for each token follows the tokens: 1 if it begins a word, plus 2 if it begins a sentence. Further
numbers are 0.
"""
import argparse
import array
import contextlib
import json
import os
import re
import stat
import sys

MAGIC, VERSION, HEADER = 20240520, 1, 256
TEXT_MAX = 8 << 30  # bytes, as in train.h
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
# The kinds of tokenizers, and their files in a folder. The first kind that is there is read.
FOLDERS = (("json", ["tokenizer.json"]), ("bpe", ["vocab.json", "merges.txt"]), ("wordpiece", ["vocab.txt"]))
WORD_START, SENTENCE_START = 1, 2
WHITE_SPACE = " \t\n\v\f\r"  # that of the C locale, as eval_gpt counts words


def without_space_inside(opening, closing):
    """A rule that removes white space behind an opening mark and before the closing one. Without a closing mark, the
    match reaches to the end of the text and changes nothing, so that no character is looked at more than once."""

    def replacement(match):
        return match[0] if not match[2] else opening + match[1].strip() + closing

    return rf"\{opening}([^\{closing}]*)(\{closing}|\Z)", replacement


# The rules of Megatron-LM (tasks/zeroshot_gpt/detokenizer.py) in their order: name, pattern, replacement. Its rule for
# a digit after an apostrophe changes no text, because its pattern has slashes, and is left out.
WIKITEXT_RULES = [
    ("possessive", r"s '", r"s'"),
    ("hyphen", r" @-@ ", r"-"),
    ("comma in a number", r" @,@ ", r","),
    ("point in a number", r" @\.@ ", r"."),
    ("colon", r" : ", r": "),
    ("semicolon", r" ; ", r"; "),
    ("full stop", r" \. ", r". "),
    ("exclamation mark", r" ! ", r"! "),
    ("question mark", r" \? ", r"? "),
    ("comma", r" , ", r", "),
    ("parentheses", *without_space_inside("(", ")")),
    ("brackets", *without_space_inside("[", "]")),
    ("braces", *without_space_inside("{", "}")),
    ("double quotes", *without_space_inside('"', '"')),
    ("single quotes", *without_space_inside("'", "'")),
    ("heading of level 4", r"= = = =", r"===="),
    ("heading of level 3", r"= = =", r"==="),
    ("heading of level 2", r"= =", r"=="),
    ("degree", " \u00b0 ", "\u00b0"),
    ("end of a line", r" \n", r"\n"),
    ("start of a line", r"\n ", r"\n"),
    ("number of the Penn Treebank", r" N ", r" 1 "),
    ("contraction", r" 's", r"'s"),
]


class Problem(Exception):
    """What the user has to change."""


@contextlib.contextmanager
def located(place):
    """Puts the place into the message of a problem."""
    try:
        yield
    except Problem as problem:
        raise Problem(f"{place}: {problem}") from problem


def detokenise_wikitext(text):
    for _, pattern, replacement in WIKITEXT_RULES:
        text = re.sub(pattern, replacement, text)
    return text


def count_words(text):
    """The parts between single spaces; 0 for a text of white space."""
    text = text.strip(WHITE_SPACE)
    return text.count(" ") + 1 if text else 0


def split_last_word(text):
    """The text before the last word, and the last word with a space in front of it."""
    parts = text.rstrip().rsplit(None, 1)
    if len(parts) != 2:
        raise Problem(f"a passage of less than two words: {text!r}")
    return parts[0].strip(), " " + parts[1]


def unique_members(pairs):
    """The members of a JSON object."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise Problem("an object has a member twice")
    return fields


def text_member(fields, name):
    """A member that must be a text that has a form in UTF-8."""
    text = fields[name]
    if not isinstance(text, str):
        raise Problem(f'"{name}" is {json.dumps(text)[:40]}, must be a text')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Problem(f'"{name}" has half a surrogate pair, \\u{ord(text[error.start]):04x}, as its character '
                      f"{error.start + 1}") from error
    return text


def passage_text(line):
    """The passage of a line of JSON."""
    try:
        fields = json.loads(line, object_pairs_hook=unique_members)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise Problem(f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        fields = {}
    if ("text" in fields) + ("context" in fields and "continuation" in fields) != 1:
        raise Problem('neither "text", nor "context" and "continuation"' if "text" not in fields else
                      '"text" as well as "context" and "continuation"')
    if "text" in fields:
        return text_member(fields, "text")
    return text_member(fields, "context").rstrip() + " " + text_member(fields, "continuation").strip()


def read_text(path):
    """The text of a regular file. A pipe without a writer, a device and a file that grows are refused."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Problem(f"{path} is not a regular file")
            if status.st_size > TEXT_MAX:
                raise Problem(f"{path} has {status.st_size} bytes, must have at most {TEXT_MAX}")
            content = file.read(status.st_size + 1)
        if len(content) > status.st_size:
            raise Problem(f"{path} has more than the {status.st_size} bytes of its size")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem(f"{path} is not UTF-8: {error}") from error


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def tokenizer_files(path):
    """The kind of a tokenizer, and its files."""
    if not os.path.isdir(path):
        return ("wordpiece" if path.endswith(".txt") else "json"), [path]
    for kind, names in FOLDERS:
        files = [os.path.join(path, name) for name in names]
        if all(os.path.exists(file) for file in files):
            return kind, files
    raise Problem(f"--tokenizer {path} has no tokenizer.json, no vocab.json with merges.txt, and no vocab.txt")


def is_letter(byte):
    """Bytes above 127 are parts of letters in UTF-8."""
    return byte > 127 or chr(byte).isalnum()


class Bytes:
    """A token is a byte."""

    def encode(self, text):
        return list(text.encode("utf-8"))

    def split(self, before, last):
        """The tokens of a passage: those of the text before its last word, and those of the last word."""
        return self.encode(before), self.encode(last)

    def words(self, text):
        """The tokens, and for each of them 1 if it begins a word."""
        tokens = self.encode(text)
        inside = [i > 0 and is_letter(t) and is_letter(tokens[i - 1]) for i, t in enumerate(tokens)]
        return tokens, [0 if i else 1 for i in inside]

    def special(self, name):
        return 256 + SPECIAL.index(name)


class Tokenizer:
    """One of the package tokenizers."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encoding(self, text):
        try:
            return self.tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # tokenizers raises Exception itself
            raise Problem(f"the tokenizer refuses it: {error}") from error

    def encode(self, text):
        return self.encoding(text).ids

    def split(self, before, last):
        """As above. A tokenizer may begin each text with a space, so that a last word alone has other tokens."""
        context, whole = self.encode(before), self.encoding(before + last)
        count = len(context)
        if whole.ids[:count] != context:  # what follows changes the tokens of the context
            count = sum(end <= len(before) for _, end in whole.offsets)
            if any((end > len(before)) != (i >= count) or (i >= count and begin < len(before))
                   for i, (begin, end) in enumerate(whole.offsets)):
                raise Problem("a token belongs to the context and to the last word")
        return whole.ids[:count], whole.ids[count:]

    def words(self, text):
        encoding = self.encoding(text)
        words = encoding.word_ids
        return encoding.ids, [int(i == 0 or word is None or word != words[i - 1]) for i, word in enumerate(words)]

    def special(self, name):
        token = self.tokenizer.token_to_id(name)
        if token is None:
            raise Problem(f"the tokenizer has no {name}")
        return token


def load_tokenizer(path, cased):
    if path == "bytes":
        return Bytes()
    kind, files = tokenizer_files(path)
    for file in files:
        if not os.path.isfile(file):  # reading a pipe would wait for a writer
            raise Problem(f"--tokenizer {file}: " + ("no file" if os.path.exists(file) else "no such file"))
    try:
        import tokenizers
    except ImportError as error:
        raise Problem("the package tokenizers is missing: pip install tokenizers") from error
    try:
        if kind == "json":
            tokenizer = tokenizers.Tokenizer.from_file(files[0])
        elif kind == "bpe":
            tokenizer = tokenizers.ByteLevelBPETokenizer(files[0], files[1])
        else:
            tokenizer = tokenizers.BertWordPieceTokenizer(files[0], lowercase=not cased)
    except Exception as error:  # tokenizers raises Exception itself
        raise Problem(f"--tokenizer {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Tokenizer(tokenizer)


# ---- token files -----------------------------------------------------------------------------------------------------


def little_endian(kind, numbers):
    values = array.array(kind, numbers)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def open_output(path):
    """A file to write, also /dev/fd/N or a pipe with a reader. A pipe without one is an error, and not waited for."""
    file = open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))
    os.set_blocking(file.fileno(), True)
    if stat.S_ISBLK(os.fstat(file.fileno()).st_mode):
        raise Problem(f"{path} is a block device")
    return file


def check_output(o):
    """The output must not overwrite what it is made of."""
    tokenizer = [] if o.tokenizer == "bytes" else [o.tokenizer]
    if os.path.isdir(o.tokenizer):
        tokenizer = [os.path.join(folder, name) for folder in tokenizer for _, names in FOLDERS for name in names]
    for path in tokenizer + (o.files if "files" in o else [o.file]):
        if os.path.exists(path) and os.path.exists(o.out) and os.path.samefile(path, o.out):
            raise Problem(f"--out {o.out} is the same file as {path}")


def write_bin(path, tokens, words=0, passages=(), special=(), marks=()):
    """passages: a pair for each of them, its tokens and those of its last word. marks: one for each token, or none."""
    if tokens and max(tokens) > 65535:
        raise Problem(f"token {max(tokens)} does not fit into 16 bits, which the file has for each token")
    if max(len(tokens), words) > 2**31 - 1:
        raise Problem(f"{len(tokens)} tokens are too many: a file has at most {2**31 - 1}")
    header = [MAGIC, VERSION, len(tokens), words, len(passages)] + ([1] + list(special) if marks else [])
    with open_output(path) as file:
        file.write(little_endian("i", header + [0] * (HEADER - len(header))))
        file.write(little_endian("H", tokens))
        file.write(little_endian("i", [number for passage in passages for number in passage]))
        file.write(bytes(marks))


def make_train(o, tokenizer):
    if o.separator is not None and not 0 <= o.separator <= 65535:
        raise Problem(f"--separator {o.separator}: expected a token from 0 to 65535")
    tokens = []
    for path in o.files:
        tokens += [] if o.separator is None else [o.separator]
        text = read_text(path)
        with located(path):
            tokens += tokenizer.encode(text)
    write_bin(o.out, tokens)
    print(f"{o.out}: {len(tokens)} tokens of {len(o.files)} texts")


def sentences_of(text):
    """The sentences without white space around them. None of them is empty."""
    parts = re.split(r"\n|(?<=\.)\s", text)
    return [part.strip() for part in parts if part.strip()]


def make_bert(o, tokenizer):
    special = [tokenizer.special(name) for name in SPECIAL]
    tokens, marks, sentences = [], [], 0
    for path in o.files:
        for sentence in sentences_of(read_text(path)):
            with located(path):
                more, starts = tokenizer.words(sentence)
            if not more:
                continue
            tokens += more
            marks += [SENTENCE_START | WORD_START] + [WORD_START if start else 0 for start in starts[1:]]
            sentences += 1
    if not tokens:
        raise Problem("the texts have no tokens")
    write_bin(o.out, tokens, special=special, marks=marks)
    words = sum(mark & WORD_START for mark in marks)
    print(f"{o.out}: {len(tokens)} tokens, {words} words, {sentences} sentences of {len(o.files)} texts")


def make_wikitext(o, tokenizer):
    text = read_text(o.file)
    words = count_words(text)
    if words == 0:
        raise Problem(f"{o.file} has no words")
    with located(o.file):
        tokens = tokenizer.encode(text if o.keep else detokenise_wikitext(text))
    write_bin(o.out, tokens, words=words)
    print(f"{o.out}: {len(tokens)} tokens of {words} words, {len(tokens) / words:.4f} for each word")


def make_lambada(o, tokenizer):
    tokens, passages = [], []
    for number, line in enumerate(read_text(o.file).split("\n"), 1):
        if not line.strip():
            continue
        with located(f"{o.file}, line {number}"):
            before, last = tokenizer.split(*split_last_word(passage_text(line)))
            if not before or not last:
                raise Problem("the tokenizer makes no tokens of it")
        tokens += before + last
        passages.append((len(before) + len(last), len(last)))
    if not passages:
        raise Problem(f"{o.file} has no passages")
    write_bin(o.out, tokens, passages=passages)
    longest = max(count for count, _ in passages)
    print(f"{o.out}: {len(passages)} passages, {len(tokens)} tokens, {longest} in the longest")


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    for name, make in (("train", make_train), ("bert", make_bert), ("wikitext", make_wikitext),
                       ("lambada", make_lambada)):
        task = tasks.add_parser(name)
        task.set_defaults(make=make)
        task.add_argument("--tokenizer", required=True, help="bytes, a file, or a directory")
        task.add_argument("--cased", action="store_true", help="do not change a text to lower case for a vocab.txt")
        task.add_argument("--out", required=True, metavar="FILE.bin")
        if name == "train":
            task.add_argument("--separator", type=int, metavar="ID", help="token in front of each text")
        if name in ("train", "bert"):
            task.add_argument("files", nargs="+", metavar="TEXT")
        else:
            task.add_argument("file", metavar="TEXT" if name == "wikitext" else "JSONL")
        if name == "wikitext":
            task.add_argument("--keep", action="store_true", help="do not detokenise the text")
    return parser.parse_args(arguments)


def main(arguments):
    o = parse(arguments)
    try:
        check_output(o)
        o.make(o, load_tokenizer(o.tokenizer, o.cased))
    except (Problem, OSError) as error:
        print(f"text_to_bin: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
