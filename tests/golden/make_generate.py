"""Continues prompts with Hugging Face's transformers, for tests/checkpoints.sh, which compares examples/04_generate.c.

    python tests/golden/make_generate.py

generate.txt  a line "MODEL PROMPT TOKENS" for each prompt: the tokens that `generate` writes after the prompt when it
              always takes the most probable one, also after the token that ends a text

The models are in float64, and together a prompt and its tokens are not longer than a model's positions. The script
refuses a prompt where the two most probable tokens are near each other, because rounding to float32 could then decide
between them. Created with PyTorch 2.15.0, transformers 5.24.0.
"""

import os

import torch
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
TOKENS, APART = 9, 1e-2
PROMPTS = [[5], [7, 11, 13], [50, 10, 20]]
MODELS = ["gpt2_hf", "gpt2_hf_untied", "llama_hf", "llama_hf_tied"]


def continued(model, prompt):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
                         eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True)
    best = torch.stack(out.logits)[:, 0].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > APART, prompt
    return out.sequences[0, len(prompt):].tolist()


with open(os.path.join(HERE, "generate.txt"), "w", encoding="ascii") as file:
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(os.path.join(HERE, name), attn_implementation="eager",
                                                     dtype=torch.float64).eval()
        for prompt in PROMPTS:
            tokens = continued(model, prompt)
            assert len(tokens) == TOKENS
            file.write(f"{name} {','.join(map(str, prompt))} {','.join(map(str, tokens))}\n")
