"""Writes small models with Hugging Face's transformers, and the logits that PyTorch computes with them.

    python tests/golden/make_hf.py              writes all directories
    python tests/golden/make_hf.py NAME...      writes these

gpt2_hf_tied/     a GPT2LMHeadModel with 8 heads, whose head is its embedding, with gelu_new
gpt2_hf_f64/      the same in f64: rounded to f32, its weights are those of gpt2_hf_tied
gpt2_hf_f16/      the same in f16
gpt2_hf_untied/   a GPT2LMHeadModel whose head is not its embedding, with gelu_fast
llama_hf/         a LlamaForCausalLM with two key/value heads, in several files with an index
llama_hf_tied/    a LlamaForCausalLM in bf16, with a tied head and biases
llama_hf_f16/     a LlamaForCausalLM in f16
bert_hf/          a BertForPreTraining; expected.safetensors also has types [tokens], lengths [sequences] and
                  binary_logits [sequences, 2], and its logits are those of masked LM

Each directory has what save_pretrained writes: config.json, with token ids and a member that the library does not know,
generation_config.json, the model, and expected.safetensors: ids [tokens] (as floats) and logits [tokens, vocab],
computed in float64 from the stored weights. tests/test_names.c loads the models and compares, and compares what it
saves with these files. Every weight and bias is random. A Llama's heads have 6 features, because with 4 the two
forms of rotary positions turn into each other in the same way. Created with PyTorch 2.15.0, transformers 5.24.0.
"""

import json
import os
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import (BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel, LlamaConfig,
                          LlamaForCausalLM)

HERE = os.path.dirname(os.path.abspath(__file__))
SEQUENCES, SEQ, VOCAB = 2, 12, 61


def write(name, model, seed, dtype=torch.float32, drawn=torch.float32, **how):
    """Weights are drawn as numbers of type `drawn`, and stored as `dtype`."""
    if sys.argv[1:] and name not in sys.argv[1:]:
        return
    folder = os.path.join(HERE, name)
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(seed)
    model = model.to(drawn)
    with torch.no_grad():
        for key, p in model.named_parameters():
            mean = 1.0 if ("norm" in key.lower() or ".ln_" in key) and key.endswith("weight") else 0.0
            p.copy_(mean + 0.3 * torch.randn(p.shape, generator=generator, dtype=drawn))
    model = model.eval().to(dtype)
    if model.can_generate():
        model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder, **how)
    config = os.path.join(folder, "config.json")
    with open(config) as f:
        members = json.load(f)
    members["a_member_of_another_program"] = {"bits": [8, 4], "note": "kept"}
    with open(config, "w") as f:
        json.dump(members, f, indent=2)
        f.write("\n")
    ids = torch.randint(0, VOCAB, (SEQUENCES, SEQ), generator=generator)
    stored = type(model).from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    expected = {"ids": ids.flatten()}
    with torch.no_grad():
        if name == "bert_hf":
            types = (torch.arange(SEQ) >= 5).long().expand(SEQUENCES, SEQ)
            lengths = torch.tensor([SEQ, 9])
            out = stored(ids, attention_mask=torch.arange(SEQ) < lengths[:, None], token_type_ids=types)
            logits = out.prediction_logits
            expected.update(types=types.flatten(), lengths=lengths, binary_logits=out.seq_relationship_logits)
        else:
            logits = stored(ids).logits
    expected["logits"] = logits.view(-1, VOCAB)
    save_file({k: v.to(torch.float32).contiguous() for k, v in expected.items()},
              os.path.join(folder, "expected.safetensors"))


tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
write("gpt2_hf_untied",
      GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=SEQ, n_embd=32, n_layer=2, n_head=8, n_inner=40,
                                 layer_norm_epsilon=1e-4, activation_function="gelu_fast", tie_word_embeddings=False,
                                 attn_implementation="eager", **tokens)), 11)
for name, dtype in (("gpt2_hf_tied", torch.float32), ("gpt2_hf_f64", torch.float64), ("gpt2_hf_f16", torch.float16)):
    write(name,
          GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=SEQ, n_embd=16, n_layer=2, n_head=8, n_inner=40,
                                     layer_norm_epsilon=1e-4, attn_implementation="eager", **tokens)), 15, dtype,
          torch.float64)
llama = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 8, "max_position_embeddings": SEQ, "rms_norm_eps": 1e-4, "attn_implementation": "eager",
         **tokens}
write("llama_hf", LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, rope_theta=500.0, **llama)), 12,
      max_shard_size="30KB")
write("llama_hf_tied",
      LlamaForCausalLM(LlamaConfig(num_key_value_heads=4, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
                                   **llama)), 13, torch.bfloat16)
write("llama_hf_f16", LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **llama)), 16, torch.float16)
write("bert_hf",
      BertForPreTraining(BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=8,
                                    intermediate_size=40, max_position_embeddings=SEQ, hidden_dropout_prob=0.2,
                                    attn_implementation="eager", **tokens)), 14)
