"""Opens what this library saves in Hugging Face's transformers: python tests/transformers_peer.py PROGRAM DIRECTORY

PROGRAM is tests/transformers_peer.c. It loads a model of tests/golden, or makes a new one of its shape, on 1 and on 4
ranks, saves it to DIRECTORY and computes its logits. The class that the saved config.json names has to open it without
a missing, an unexpected or a mismatched tensor, and to have these logits.
"""

import json
import os
import shutil
import subprocess
import sys

import torch
import transformers
from safetensors import safe_open

program, directory = sys.argv[1:3]
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden")
MODELS = ["gpt2_hf_tied", "gpt2_hf_untied", "llama_hf", "llama_hf_tied", "bert_hf"]
SEQUENCES, SEQ, VOCAB = 2, 12, 61


def opened(folder):
    """The model, after a look at what transformers says of its tensors."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        name, = json.load(f)["architectures"]
    model, about = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not about[what], (folder, what, about[what])
    return model.eval()


def numbers(source):
    with safe_open(os.path.join(source, "expected.safetensors"), "pt") as f:
        return {name: f.get_tensor(name).long() for name in f.keys() if name in ("ids", "types", "lengths")}


def logits(model, given):
    """Those of each token; of a BERT, also those of the sentence order."""
    ids = given["ids"].view(SEQUENCES, SEQ)
    with torch.no_grad():
        if "types" not in given:
            return {"logits": model(ids).logits}
        seen = torch.arange(SEQ) < given["lengths"][:, None]
        out = model(ids, attention_mask=seen, token_type_ids=given["types"].view(SEQUENCES, SEQ))
    return {"logits": out.prediction_logits, "order": out.seq_relationship_logits}


def check(name, tp, pp, kind):
    source, to = os.path.join(GOLDEN, name), os.path.join(directory, f"{name}-{tp}-{pp}-{kind}")
    shutil.rmtree(to, ignore_errors=True)
    os.makedirs(to)
    subprocess.run([program, source, to, str(tp), str(pp), kind], check=True, timeout=1800)
    found = logits(opened(os.path.join(to, "step-00000005")), numbers(source))
    for what, theirs in found.items():
        with open(os.path.join(to, what + ".f32"), "rb") as f:
            ours = torch.frombuffer(bytearray(f.read()), dtype=torch.float32).double()
        theirs = theirs.flatten()
        assert ours.shape == theirs.shape and theirs.abs().max() > 0, (to, what)
        off = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        assert off < 1e-5, (to, what, off)
    print(f"{name}, {kind}, tensor {tp} x pipeline {pp}: opens, and has the logits")


for model_name in MODELS:
    for split in ((1, 1), (2, 2)):
        for how in ("import", "new"):
            check(model_name, *split, how)
