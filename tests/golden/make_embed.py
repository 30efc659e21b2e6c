"""Writes sentence embeddings of transformers' BertModel, for examples/embed.c: the mean of the outputs over the tokens
of a sentence, divided by its length.

    python tests/golden/make_embed.py

embed/ids.txt      the tokens of a sentence in each line
embed/vectors.txt  its vector

The model is that of bert_hf/, in float64. Created with PyTorch 2.15.0, transformers 5.24.0.
"""

import os

import torch
from transformers import BertModel

HERE = os.path.dirname(os.path.abspath(__file__))
model = BertModel.from_pretrained(os.path.join(HERE, "bert_hf"), attn_implementation="eager").eval().double()
vocab, positions = model.config.vocab_size, model.config.max_position_embeddings
generator = torch.Generator().manual_seed(5)
lengths = [1, positions, 3, 7, 2, positions - 1, 5]
sentences = [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]

# All sentences are one batch with padding, as sentence-transformers runs them.
ids = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)
mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).double()
with torch.no_grad():
    outputs = model(ids, attention_mask=mask).last_hidden_state
means = (outputs * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
vectors = torch.nn.functional.normalize(means)

os.makedirs(os.path.join(HERE, "embed"), exist_ok=True)
for name, lines in (("ids", [[str(x) for x in s.tolist()] for s in sentences]),
                    ("vectors", [[f"{x:.9g}" for x in v] for v in vectors.tolist()])):
    with open(os.path.join(HERE, "embed", name + ".txt"), "w", encoding="ascii") as file:
        file.writelines(" ".join(line) + "\n" for line in lines)
