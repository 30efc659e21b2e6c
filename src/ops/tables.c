/* ---- the tables of all operators --------------------------------------------------------------------------------- */

#pragma once
#include "fill.c"
#include "add.c"
#include "hash.c"
#include "sum.c"
#include "bias.c"
#include "linear.c"
#include "norm.c"
#include "random_normal.c"
#include "attention.c"
#include "attention_merge.c"
#include "kv_cache.c"
#include "embedding.c"
#include "softmax.c"
#include "router.c"
#include "sample.c"
#include "adamw.c"
#include "step.c"
#include "pointwise.c"
#include "scale_add.c"

static const mti_table *const mti_tables[] = {&mti_fill_table,
                                              &mti_copy_table,
                                              &mti_upload_table,
                                              &mti_download_table,
                                              &mti_convert_table,
                                              &mti_add_table,
                                              &mti_hash_table,
                                              &mti_sum_table,
                                              &mti_sum_of_squares_table,
                                              &mti_tree_sum_table,
                                              &mti_bias_forward_table,
                                              &mti_bias_backward_table,
                                              &mti_activation_forward_table,
                                              &mti_activation_backward_table,
                                              &mti_linear_forward_table,
                                              &mti_linear_activation_forward_table,
                                              &mti_linear_activation_backward_table,
                                              &mti_linear_gradients_table,
                                              &mti_norm_forward_table,
                                              &mti_norm_backward_table,
                                              &mti_random_normal_table,
                                              &mti_bias_dropout_add_forward_table,
                                              &mti_bias_dropout_add_backward_table,
                                              &mti_rotary_table_table,
                                              &mti_rotary_forward_table,
                                              &mti_rotary_backward_table,
                                              &mti_embedding_forward_table,
                                              &mti_embedding_backward_table,
                                              &mti_cross_entropy_stats_table,
                                              &mti_cross_entropy_combine_table,
                                              &mti_cross_entropy_backward_table,
                                              &mti_cross_entropy_forward_backward_table,
                                              &mti_softmax_forward_table,
                                              &mti_softmax_backward_table,
                                              &mti_log_softmax_forward_table,
                                              &mti_log_softmax_backward_table,
                                              &mti_softmax_shard_stats_table,
                                              &mti_softmax_shard_forward_table,
                                              &mti_softmax_shard_sums_table,
                                              &mti_softmax_shard_backward_table,
                                              &mti_router_forward_table,
                                              &mti_router_backward_table,
                                              &mti_router_sums_table,
                                              &mti_router_losses_table,
                                              &mti_router_bias_update_table,
                                              &mti_sample_candidates_table,
                                              &mti_sample_ids_table,
                                              &mti_adamw_step_table,
                                              &mti_step_decide_table,
                                              &mti_multiply_table,
                                              &mti_multiply_row_forward_table,
                                              &mti_multiply_col_forward_table,
                                              &mti_sigmoid_forward_table,
                                              &mti_sigmoid_backward_table,
                                              &mti_silu_forward_table,
                                              &mti_silu_backward_table,
                                              &mti_sigmoid_gate_forward_table,
                                              &mti_multiply_row_backward_table,
                                              &mti_multiply_col_backward_table,
                                              &mti_sigmoid_gate_backward_table,
                                              &mti_kv_cache_append_table,
                                              &mti_kv_cache_attention_table,
                                              &mti_attention_forward_table,
                                              &mti_attention_backward_table,
                                              &mti_dot_product_attention_forward_table,
                                              &mti_dot_product_attention_backward_table,
                                              &mti_attention_merge_table,
                                              &mti_gemm_table,
                                              &mti_scale_add_table};

MT_API const mt_rule *mt_rule_of(const char *name) {
    size_t i;
    for (i = 0; name && i < sizeof mti_tables / sizeof *mti_tables; i++)
        if (strcmp(mti_tables[i]->name, name) == 0) return mti_tables[i]->rule.operands ? &mti_tables[i]->rule : NULL;
    return NULL;
}
