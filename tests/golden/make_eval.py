"""Computes perplexity and the results of a cloze test with Hugging Face's transformers, for tests/test_eval.c.

    python tests/golden/make_eval.py

eval/text.bin       random tokens, in the format of examples/text_to_bin.py
eval/cloze.bin      passages. The answers of some are what gpt2_hf/ predicts; of others one token differs.
eval/expected.txt   a line "text SEQ STRIDE SUM" for each pair of flags, with the sum of the losses of all targets; a
                    line "cloze SEQ RIGHT", with a digit 1 for each passage that is right, and 0 for the others
eval/llama_hf.txt, eval/llama_hf_tied.txt
                    the lines of the text for these models, in the first one also those of the passages of
eval/llama_hf_cloze.bin
                    which are made with llama_hf/

The model of expected.txt is that of gpt2_hf/. All are in float64. Each target has a forward of its own, over the tokens
that it may see. Created with PyTorch 2.15.0 and transformers 5.23.0, those of the Llamas with transformers 5.24.0.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "..", "examples"))
from text_to_bin import write_bin  # noqa: E402

TOKENS, WORDS, PASSAGES = 45, 37, 24
PAIRS = [(12, 12), (12, 5), (12, 1), (8, 3)]
LLAMAS = ["llama_hf", "llama_hf_tied"]


def load(name):
    return AutoModelForCausalLM.from_pretrained(os.path.join(HERE, name), attn_implementation="eager",
                                                dtype=torch.float64).eval()


model = load("gpt2_hf")
vocab, positions = model.config.vocab_size, model.config.n_positions
generator = torch.Generator().manual_seed(11)


def draw(count):
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


def log_probabilities(tokens):
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], dim=0)


def loss(tokens, target, seq, stride):
    """The loss of tokens[target]. The windows begin at multiples of the stride."""
    first = max(0, -(-(target - seq) // stride) * stride)
    return -log_probabilities(tokens[first:target])[tokens[target]].item()


def is_right(tokens, answer, seq):
    first = max(0, len(tokens) - 1 - seq)
    return all(log_probabilities(tokens[first:t]).argmax().item() == tokens[t]
               for t in range(len(tokens) - answer, len(tokens)))


def make_passage(number):
    tokens, answer = draw(3 + number % 13), 1 + number % 3
    for _ in range(answer):
        tokens.append(log_probabilities(tokens[-positions:]).argmax().item())
    if number % 2:  # one wrong token, each place in turn
        at = len(tokens) - 1 - number // 2 % answer
        tokens[at] = (tokens[at] + 1) % vocab
    return tokens, answer


def write_passages(name):
    passages = [make_passage(i) for i in range(PASSAGES)]
    write_bin(os.path.join(HERE, "eval", name), sum((tokens for tokens, _ in passages), []),
              passages=[(len(tokens), answer) for tokens, answer in passages])
    return passages


def write_right(file, passages):
    for seq in (positions, 5):
        file.write(f"cloze {seq} " + "".join(str(int(is_right(*p, seq))) for p in passages) + "\n")


def write_sums(file):
    for seq, stride in PAIRS:
        total = sum(loss(text, t, seq, stride) for t in range(1, TOKENS))
        file.write(f"text {seq} {stride} {total:.12g}\n")


text = draw(TOKENS)
write_bin(os.path.join(HERE, "eval", "text.bin"), text, words=WORDS)
of_gpt2 = write_passages("cloze.bin")
with open(os.path.join(HERE, "eval", "expected.txt"), "w", encoding="ascii") as file:
    write_sums(file)
    write_right(file, of_gpt2)
for name in LLAMAS:
    model = load(name)
    with open(os.path.join(HERE, "eval", name + ".txt"), "w", encoding="ascii") as file:
        write_sums(file)
        if name == "llama_hf":
            write_right(file, write_passages("llama_hf_cloze.bin"))
