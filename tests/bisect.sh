#!/bin/sh
# Whether the hash log of train_gpt finds bugs that depend on the split: plants them one by one into a copy of the headers,
# trains on one rank and on a split that shows the bug, and looks at the first line in which diff finds the two logs different.
#
#   sh tests/bisect.sh        one line per bug, closing line "N passed, N failed, N skipped"
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
work=$(mktemp -d) || exit 1
check_log=$work/log
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
model="--invariant 4 --data README.md --layers 2 --hidden 32 --heads 8 --kv-heads 4 --seq 16 --batch 4 --dropout 0.1 --steps 2
    --warmup 0 --sample 0 --eval-interval 0"

# copy_and_plant HEADER SED: a copy of the headers with one bug in it; fails when there is nothing to plant it in
copy_and_plant() {
    rm -rf "$work/copy" && mkdir "$work/copy" && cp ./*.h ./*.cuh "$work/copy" || return 1
    [ -n "$1" ] || return 0
    sed "$2" "$1" >"$work/copy/$1" || return 1
    cmp -s "$1" "$work/copy/$1" || return 0
    echo "the bug does not fit into $1 any more: $2"
    return 1
}

# train SPLIT LOG
train() {
    # shellcheck disable=SC2086  # lists of flags
    "$work/train_gpt" $model $1 --hash-log "$2" >/dev/null
}

# first_difference SPLIT: the first line of one rank's log that the split does not have, without the hash
first_difference() {
    "$CC" -O1 -I"$work/copy" examples/train_gpt.c -o "$work/train_gpt" -lm -lpthread || return 1
    train "--tp 1" "$work/one" && train "$1" "$work/split" || return 1
    diff "$work/one" "$work/split" | sed -n 's/^< \([0-9]* [^ ]*\) .*/\1/p' | head -n 1
}

# finds EXPECTED SPLIT HEADER SED: the bug is named by this line; "" for no difference
finds() {
    copy_and_plant "$3" "$4" || return 1
    found=$(first_difference "$2") || { echo "$found"; return 1; }
    [ "$found" = "$1" ] && return 0
    echo "the logs first differ in '$found', not in '$1'"
    diff "$work/one" "$work/split" | head -n 20
    return 1
}

check "no bug: no difference" finds "" "--tp 2 --dp 2 --sequence-parallel" "" ""
check "no bug, a pipeline: no difference" finds "" "--tp 2 --pp 2 --dp 2" "" ""
check "row-parallel bias added before the reduction" \
    finds "2 decoder.layers.0.self_attention.linear_proj.output" "--tp 2" mt_parallel.h \
    's|^        MT_TRY(mt_overlap_begin(ctx, layer->tensor, c.count > 1|        if (layer->bias) MT_TRY(mt_bias_forward(ctx, partial, layer->bias->value));&|'
check "input gradient of a column-parallel layer not reduced" \
    finds "1 output_layer.input_grad" "--tp 2" mt_parallel.h \
    's|mti_reduce_tokens(ctx, layer->tensor, sp, partial, dx))|MT_SUCCESS)|'
check "attention dropout drawn by local head" \
    finds "1 decoder.layers.0.self_attention.core_attention.output" "--tp 4" megatron.h \
    's|^    s.dropout.at.first_col = a->first_group \* s.heads_per_group;||'
check "hidden dropout drawn by local token under sequence parallelism" \
    finds "1 embedding.output" "--tp 2 --sequence-parallel" megatron.h \
    's|batch->first_sequence \* batch->seq + (sequence_parallel ? mt_comm_rank(tensor) \* rows : 0)|batch->first_sequence * batch->seq|'
check "weights drawn by local element" \
    finds "1 decoder.layers.0.self_attention.linear_qkv.output" "--tp 2" mt_parallel.h \
    's/MT_SPLIT_COLS ? 0 : b.global;/MT_SPLIT_COLS ? 0 : b.global % p->local_features;/'
check "target looked up by local vocabulary index" \
    finds "1 loss.output" "--tp 2" mt_parallel.h \
    's|^    shape.first_col = ((int64_t)mt_comm_rank(tensor) \* shards + shard) \* shard_cols;|    shape.first_col = shard * shard_cols;|'
check "sequence-parallel gradients not summed over the tensor group" \
    finds "1 embedding.position_embeddings.weight.grad" "--tp 2 --sequence-parallel" mt_parallel.h \
    's|^    if (params->partial == 0) return MT_SUCCESS;|    return MT_SUCCESS;|'
check "gradients not summed over the data group" \
    finds "1 embedding.word_embeddings.weight.grad" "--dp 2" mt_parallel.h \
    's|return mt_all_reduce(ctx, data, grads, .*|return MT_SUCCESS;|'
check "replicated parameters counted on every rank in the gradient norm" \
    finds "1 grad_norm" "--tp 4" mt_parallel.h \
    's|^    if (p->desc.placement == MT_REPLICATED && grid->tensor_rank != 0) return 0;||'
check "micro-batches added up one after the other" \
    finds "1 embedding.word_embeddings.weight.grad" "--dp 2" mt_parallel.h \
    '/^MT_API mt_status mt_accumulate_gradients/,/^}/s|^    if (!ctx->invariant) return MT_SUCCESS;|    return MT_SUCCESS;|'
check "layers of a pipeline stage counted from 0" \
    finds "1 decoder.layers.1.self_attention.core_attention.output" "--pp 2" megatron.h \
    's|^        gpt->desc.layer.layer = gpt->first_layer + i;|        gpt->desc.layer.layer = i;|'
check "gradients of the tied embedding's two copies not added up" \
    finds "1 embedding.word_embeddings.weight.grad" "--pp 2" mt_parallel.h \
    's|^        MT_TRY(mt_all_reduce(ctx, embedding, grad.data.*||'
check "both copies of a tied embedding counted in the gradient norm" \
    finds "1 grad_norm" "--pp 2" mt_parallel.h \
    's|^    return !(p->desc.shared_embedding && .*|    return 1;|'
check "one input of a stage for all micro-batches in flight" \
    finds "1 decoder.layers.1.input_layernorm.input_grad" "--pp 2 --schedule gpipe" mt_parallel.h \
    's|^    return p->inputs.data ? mt_tensor_rows(p->inputs, slot \* p->stage->rows, p->stage->rows) : mt_none();|    return p->inputs.data ? mt_tensor_rows(p->inputs, 0, p->stage->rows) : mt_none();|'
closing_line
[ "$failed" -eq 0 ]
