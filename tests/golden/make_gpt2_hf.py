"""Writes a small GPT-2 with Hugging Face's transformers, and the values that PyTorch computes with it.

    python tests/golden/make_gpt2_hf.py

gpt2_hf/          GPT2LMHeadModel.save_pretrained: model.safetensors, config.json
gpt2_hf_bare/     the same model in the form of the hub's first GPT-2 files: names without the prefix
                  "transformer.", the buffers of the causal mask among the tensors, a copy of the embedding as
                  lm_head.weight, and few members in config.json
gpt2_hf/expected.safetensors
                  ids, targets [tokens] (as floats), logits [tokens, vocab], loss [tokens] and grad_norm [1], that of
                  the mean loss, computed in float64 from the float32 weights

tests/test_checkpoint.c loads both and compares. Every weight and bias is random, and heads, layers and sizes are
different numbers, so the test detects a tensor that is omitted or transposed. Created with PyTorch 2.6.0, transformers
5.23.0, safetensors 0.8.0.
"""

import json
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

HERE = os.path.dirname(os.path.abspath(__file__))
SEQUENCES, SEQ = 4, 12

config = GPT2Config(vocab_size=61, n_positions=SEQ, n_embd=16, n_layer=2, n_head=4, n_inner=40, layer_norm_epsilon=1e-4,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
                    attn_implementation="eager")
generator = torch.Generator().manual_seed(7)
model = GPT2LMHeadModel(config).eval()
with torch.no_grad():
    for name, p in model.named_parameters():
        mean = 1.0 if name.split(".")[-2].startswith("ln_") and name.endswith("weight") else 0.0
        p.copy_(mean + 0.3 * torch.randn(p.shape, generator=generator))

plain = os.path.join(HERE, "gpt2_hf")
model.save_pretrained(plain)
for name in ("generation_config.json",):
    if os.path.exists(os.path.join(plain, name)):
        os.remove(os.path.join(plain, name))

bare = os.path.join(HERE, "gpt2_hf_bare")
os.makedirs(bare, exist_ok=True)
state = {k.removeprefix("transformer."): v.clone().contiguous() for k, v in model.state_dict().items()}
for i in range(config.n_layer):
    state[f"h.{i}.attn.bias"] = torch.tril(torch.ones(SEQ, SEQ)).view(1, 1, SEQ, SEQ)
    state[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
save_file(state, os.path.join(bare, "model.safetensors"), {"format": "pt"})
with open(os.path.join(bare, "config.json"), "w") as f:
    json.dump({k: getattr(config, k) for k in ("model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head",
                                               "n_inner", "layer_norm_epsilon")}, f, indent=2)

ids = torch.randint(0, config.vocab_size, (SEQUENCES, SEQ), generator=generator)
targets = torch.randint(0, config.vocab_size, (SEQUENCES * SEQ,), generator=generator)
model = model.double()
logits = model(ids).logits.view(-1, config.vocab_size)
loss = F.cross_entropy(logits, targets, reduction="none")
loss.mean().backward()
norm = torch.sqrt(sum((p.grad ** 2).sum() for p in model.parameters()))
expected = {"ids": ids.flatten(), "targets": targets, "logits": logits.detach(), "loss": loss.detach(),
            "grad_norm": norm.view(1)}
expected = {k: v.to(torch.float32).contiguous() for k, v in expected.items()}
save_file(expected, os.path.join(plain, "expected.safetensors"))
print(f"mean loss {loss.mean().item():.6f}, gradient norm {norm.item():.6f}")
