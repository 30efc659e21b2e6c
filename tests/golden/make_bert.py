"""Writes the golden values of mt_bert for tests/test_golden.c: whole BERTs with both of their losses.

    python tests/golden/make_bert.py            writes NAME.bin beside this script, prints a table
    python tests/golden/make_bert.py --check    writes nothing; exit 1 if a file would change

Names of models after that restrict it to these.

The layers, AdamW and the file format are those of make_golden.py. With Hugging Face's transformers
installed, bert_post_ln is also compared with its BertForPreTraining: both logits, the loss and all
gradients must agree to 1e-12 in float64.

The models, each with 4 sequences of 12 tokens of two types:

    bert_post_ln      the original BERT: a norm of the embeddings, post-LN, GELU (erf), eps 1e-12;
                      8 heads of size 2
    bert_pre_ln       pre-LN and a final norm, GELU (tanh); its vocabulary of 53 is a multiple of
                      neither 2 nor 3; a sentence without a label

Both have sequences with padding, whose targets are ignored, as are those of some other tokens.
Gradients are those of sum(loss) / (targets that are not ignored) + sop_scale * sum(sop_loss).

Further records, beside those of make_golden.py:

    config/token_types, config/sop_scale
    token_types     [sequences, seq]; sentence_order [1, sequences]: 0, 1 or -100
    sop_logits      [sequences, 2]; sop_loss [1, sequences]
    step_loss       the sum of which the gradient is taken, before each of the 5 steps
"""

import sys

import torch
import torch.nn.functional as F

from make_golden import (BIDIRECTIONAL, DEFAULTS, GELU_ERF, GELU_TANH, POST_LN, PRE_LN, gelu,
                         hidden_states, linear, make_batch, make_file, make_parameters, norm,
                         write_or_check)

try:
    import transformers
except ImportError:
    transformers = None

COMMON = dict(mask=BIDIRECTIONAL, token_types=2)
VARIANTS = {
    "bert_post_ln": dict(
        vocab=61, layers=2, hidden=16, heads=8, kv_heads=8, ffn=32, placement=POST_LN,
        activation=GELU_ERF, norm_eps=1e-12, sop_scale=0.25),
    "bert_pre_ln": dict(
        vocab=53, layers=2, hidden=16, heads=4, kv_heads=4, ffn=40, placement=PRE_LN,
        activation=GELU_TANH, max_norm=2.0, sop_scale=0.375),
}
LENGTHS = {"bert_post_ln": [12, 7, 12, 10], "bert_pre_ln": [9, 12, 4, 12]}
IGNORED = {"bert_post_ln": [0, 3, 4, 5, 8, 12, 13, 16, 24, 25, 29, 33, 36, 41, 42],
           "bert_pre_ln": [0, 3, 6, 7, 12, 14, 18, 22, 24, 26, 36, 40, 43]}
FIRST_SENTENCE = [5, 3, 8, 6]                      # tokens of type 0 in each sequence
SENTENCE_ORDER = {"bert_post_ln": [0, 1, 1, 0], "bert_pre_ln": [1, None, 0, 1]}


def cross_entropy(c, logits, targets):
    return F.cross_entropy(logits, targets.view(-1), ignore_index=c["ignore_index"],
                           reduction="none")


def forward(c, p, batch):
    x = hidden_states(c, p, batch)
    y = norm(c, p, "lm_head.layer_norm", gelu(c, linear(p, "lm_head.dense", x)))
    logits = F.linear(y, p["embedding.word_embeddings.weight"], p["output_layer.bias"])
    logits = logits.view(-1, c["vocab"])
    sop_logits = linear(p, "binary_head", torch.tanh(linear(p, "pooler.dense", x[:, 0])))
    loss = cross_entropy(c, logits, batch["targets"])
    sop_loss = cross_entropy(c, sop_logits, batch["sentence_order"])
    values = {"logits": logits, "loss": loss, "sop_logits": sop_logits, "sop_loss": sop_loss}
    return values, loss.sum() / c["valid"] + c["sop_scale"] * sop_loss.sum()


def split_qkv(c, qkv):
    """Queries, keys and values of a weight or bias with the rows [q k v] of each head."""
    parts = qkv.view(c["heads"], 3, c["hidden"] // c["heads"], -1)
    return [parts[:, i].reshape(c["hidden"], -1).view(c["hidden"], *qkv.shape[1:])
            for i in range(3)]


def hugging_face_names(c, values):
    """The values of all parameters, by the names of BertForPreTraining."""
    names = {
        "embedding.word_embeddings": "bert.embeddings.word_embeddings",
        "embedding.position_embeddings": "bert.embeddings.position_embeddings",
        "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
        "embedding.layernorm": "bert.embeddings.LayerNorm",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
        "output_layer": "cls.predictions",
        "pooler.dense": "bert.pooler.dense",
        "binary_head": "cls.seq_relationship",
    }
    for i in range(c["layers"]):
        ours, theirs = f"encoder.layers.{i}.", f"bert.encoder.layer.{i}."
        names[ours + "self_attention.linear_proj"] = theirs + "attention.output.dense"
        names[ours + "input_layernorm"] = theirs + "attention.output.LayerNorm"
        names[ours + "mlp.linear_fc1"] = theirs + "intermediate.dense"
        names[ours + "mlp.linear_fc2"] = theirs + "output.dense"
        names[ours + "pre_mlp_layernorm"] = theirs + "output.LayerNorm"
    out = {}
    for name, value in values.items():
        base, kind = name.rsplit(".", 1)
        if base.endswith("linear_qkv"):
            layer = base.split(".")[2]
            for part, rows in zip(("query", "key", "value"), split_qkv(c, value)):
                out[f"bert.encoder.layer.{layer}.attention.self.{part}.{kind}"] = rows
        else:
            out[f"{names[base]}.{kind}"] = value
    return out


def hugging_face_model(c, initial):
    config = transformers.BertConfig(
        vocab_size=c["vocab"], hidden_size=c["hidden"], num_hidden_layers=c["layers"],
        num_attention_heads=c["heads"], intermediate_size=c["ffn"], hidden_act="gelu",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=c["seq"], type_vocab_size=c["token_types"],
        layer_norm_eps=c["norm_eps"],
        pad_token_id=None)  # with one, PyTorch does not sum the gradient of its embedding
    model = transformers.BertForPreTraining(config).double().eval()
    parameters = dict(model.named_parameters())
    named = hugging_face_names(c, initial)
    assert set(named) == set(parameters), set(named) ^ set(parameters)
    with torch.no_grad():
        for name, value in named.items():
            parameters[name].copy_(value)
    return model


def compare_with_hugging_face(c, initial, batch):
    """Returns the largest error relative to the largest element of a tensor."""
    model = hugging_face_model(c, initial)
    out = model(input_ids=batch["ids"], token_type_ids=batch["token_types"],
                attention_mask=torch.arange(c["seq"])[None, :] < batch["lengths"][:, None],
                labels=batch["targets"], next_sentence_label=batch["sentence_order"])
    out.loss.backward()
    p = {name: value.clone().requires_grad_() for name, value in initial.items()}
    values, total = forward(c, p, batch)
    total.backward()
    pairs = [(total, out.loss),
             (values["logits"], out.prediction_logits.view(-1, c["vocab"])),
             (values["sop_logits"], out.seq_relationship_logits)]
    gradients = hugging_face_names(c, {name: value.grad for name, value in p.items()})
    largest = max(g.abs().max() for g in gradients.values())
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    # relative to the largest gradient of all: that of a key's bias is zero, up to rounding
    errors += [((gradients[name] - parameter.grad).abs().max() / largest).item()
               for name, parameter in model.named_parameters()]
    return max(errors)


def make(name, seed):
    c = {**DEFAULTS, **COMMON, **VARIANTS[name]}
    generator = torch.Generator().manual_seed(seed)
    initial = make_parameters(c, generator)
    batch = make_batch(c, generator, LENGTHS[name], IGNORED[name])
    batch["token_types"] = (torch.arange(c["seq"])[None, :]
                            >= torch.tensor(FIRST_SENTENCE)[:, None]).long()
    batch["sentence_order"] = torch.tensor(
        [c["ignore_index"] if label is None else label for label in SENTENCE_ORDER[name]])
    data, line = make_file(name, c, forward, initial, batch)
    if c["placement"] == POST_LN and transformers is not None:
        error = compare_with_hugging_face(c, initial, batch)
        line += f"  {error:.1e} from transformers {transformers.__version__}"
        assert error < 1e-12, line
    return data, line


def main():
    different = write_or_check(VARIANTS, make, 1240, __doc__)
    if transformers is None:
        print("transformers is not installed: bert_post_ln was not compared with it")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
