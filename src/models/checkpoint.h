/* ---- checkpoints of a GPT and of a BERT -------------------------------------------------------------------------- */

#pragma once
#include "gpt.h"
#include "bert.h"
#include "../files/checkpoint.h"

/* Creates an mt_checkpoint of a GPT. Call it instead of mt_checkpoint_create (mt_parallel.h); save, load, import and
   destroy are the functions of mt_parallel.h. gpt must outlive the checkpoint. desc->format and desc->model must
   be NULL (MT_ERR_ARGUMENT), because a GPT has a format of its own. The files describe the GPT in their metadata. Load
   and import return MT_ERR_DATA for files that describe a different GPT, even when all shapes agree (for example
   another number of heads, another activation, another window or another qkv_layout). Metadata without a qkv_layout,
   rotary_form, rotary_dim, window, softcap, alibi or scale mean 0.

   Hugging Face: A GPT of one of the two kinds below, without window, softcap, alibi and scale, is stored with the names
   and layouts of Hugging Face's transformers and a config.json, so that from_pretrained opens the directory of the
   checkpoint. Its head may be tied or not.
     GPT2LMHeadModel   MT_PRE_LN, MT_LAYER_NORM, any activation except MT_SWIGLU, biases, learned positions, kv_heads
                       equal to heads, a causal mask
     LlamaForCausalLM  MT_PRE_LN, MT_RMS_NORM, MT_SWIGLU, rotary positions of all features of a head, a causal mask, any
                       kv_heads, biases everywhere or nowhere
   mt_checkpoint_import reads files that transformers wrote, with or without the first word of the names
   ("transformer.", "model."), and converts them to the qkv_layout and the rotary_form of the model. Import ignores
   causal masks and frequencies in the files, and warns of those that are not what transformers computes. When the head
   is tied, files may have lm_head.weight instead of the embedding. If they have both, these must be equal
   (MT_ERR_DATA). When load or import has read a config.json of this model, saves keep its members (token ids,
   dropout, ...), and generation_config.json.
   Any other GPT is stored with the names, shapes and layouts of the registry. Files never have the padding of
   mt_gpt_desc.padded_vocab, so they load with any padded_vocab.

   A table of your own (mt_checkpoint_desc.table) takes the place of these names. `part` of its rows is 0 or an
   mt_layer_part (otherwise MT_ERR_ARGUMENT). Import then does not check config.json, and saves copy the one that was
   read last. */
MT_API mt_status mt_gpt_checkpoint_create(mt_context *ctx, mt_params *params, const mt_gpt *gpt,
                                          const mt_checkpoint_desc *desc, mt_checkpoint **out);

/* The same for a BERT. With MT_POST_LN, MT_LAYER_NORM, biases and learned positions, without window, softcap,
   alibi and scale (the original BERT), the files have the names and layouts of transformers and a config.json:
   BertForPreTraining opens them or, with no_binary_head, BertForMaskedLM. Any other BERT is stored with the names,
   shapes and layouts of the registry.
   mt_checkpoint_import reads files of BertForPreTraining, BertForMaskedLM and BertModel, also with the older names of
   norms (LayerNorm.gamma, LayerNorm.beta). Parameters of heads that the files do not have keep their values, which
   needs mt_params_init before. A model with no_binary_head ignores pooler and sentence order in the files, and warns.
   Files may have cls.predictions.decoder.weight and .bias instead of the embedding and cls.predictions.bias. If they
   have both, these must be equal (MT_ERR_DATA). */
MT_API mt_status mt_bert_checkpoint_create(mt_context *ctx, mt_params *params, const mt_bert *bert,
                                           const mt_checkpoint_desc *desc, mt_checkpoint **out);

/* Reads the desc of a stored GPT, for mt_gpt_create. directory is that of one checkpoint (see mt_checkpoint_path) or of
   a GPT-2 or a Llama of Hugging Face. The desc of a checkpoint is in its metadata; that of Hugging Face is in
   config.json. Fields that do not change the output of a model (dropout, init, sequence_parallel, padded_vocab,
   ...) become 0. Not collective. MT_ERR_IO: the files cannot be read. MT_ERR_DATA: they describe no GPT that this
   library can build; the message names the member of config.json, its value and what is accepted. After an error *out
   is unchanged. */
MT_API mt_status mt_gpt_desc_read(mt_context *ctx, const char *directory, mt_gpt_desc *out);

/* The same for a BERT of a checkpoint or of Hugging Face. For the latter no_binary_head becomes 1 when the files have
   no tensors of sentence order (cls.seq_relationship). Set it to 0 to keep the pooler of a BertModel, and call
   mt_params_init before the import. */
MT_API mt_status mt_bert_desc_read(mt_context *ctx, const char *directory, mt_bert_desc *out);
