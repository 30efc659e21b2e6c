/* ---- rotary positions, on a GPU ---------------------------------------------------------------------------------- */

#pragma once
#include "attention_desc.c"

#if MT_HAS_CUDA
extern "C++" {

/* Rotates the two vectors of mti_rotary_op, `low` and then `high`, by MTI_VECTOR angles. */
template <bool PAIRS>
static __device__ __forceinline__ void mti_rotary_turn(float *both, const float *cosine, const float *sine,
                                                       float sign) {
    MT_DEVICE_UNROLL
    for (int e = 0; e < MTI_VECTOR; e++) {
        int a = PAIRS ? 2 * e : e, b = PAIRS ? 2 * e + 1 : MTI_VECTOR + e;
        float x = both[a], y = both[b], t = sign * sine[e];
        both[a] = x * cosine[e] - y * t;
        both[b] = y * cosine[e] + x * t;
    }
}

/* Rotates two vectors, `low` and `high`, of a query or key. With PAIRS they are neighbours, which hold whole pairs.
   Otherwise they are a vector of the first half and the same vector of the second half. `row` is the token, and col /
   MTI_VECTOR the number of the vector of angles among those of all queries and keys. TYPE is the type of qkv. The
   table is then f32, and all vectors are whole. */
template <int TYPE, bool PAIRS> struct mti_rotary_op {
    struct input {
        mti_fetched<TYPE == MTI_ANY_TYPE ? MTI_ANY_TYPE : MT_F32> cosine, sine;
        mti_fetched<TYPE> low, high;
    };
    /* The first angle, the columns of the two vectors, and the numbers of angles and of elements of the vectors. */
    struct place {
        int64_t angle, low, high;
        int angles, in_low, in_high;
    };
    mti_view qkv, table;
    int64_t head_dim, half;
    mti_divider vectors, turned, seq; /* vectors of a half, queries and keys of a group, tokens of a sequence */
    float sign;
    __device__ place at(int64_t col) const {
        int64_t i = col / MTI_VECTOR, head = mti_divide_by(i, vectors), group = mti_divide_by(head, turned);
        place p;
        p.angle = (i - head * vectors.by) * MTI_VECTOR;
        /* Typed vectors are whole. In f32, ptxas for sm_120 spills a register if it knows that. */
        p.angles = mti_fetched<TYPE>::size == 2 ? MTI_VECTOR : mti_vector_size(half, p.angle);
        /* adding `group` skips the values of earlier groups */
        p.low = (head + group) * head_dim + (PAIRS ? 2 * p.angle : p.angle);
        p.high = p.low + (PAIRS ? MTI_VECTOR : half);
        p.in_low = PAIRS ? mti_vector_size(2 * p.angles, 0) : p.angles;
        p.in_high = PAIRS ? 2 * p.angles - p.in_low : p.angles;
        return p;
    }
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int, input &in) const {
        fetch_at<WIDE>(row, row - mti_divide_by(row, seq) * seq.by, col, in);
    }
    template <bool WIDE> __device__ void fetch_at(int64_t row, int64_t position, int64_t col, input &in) const {
        place p = at(col);
        mti_fetch<WIDE>(qkv, row, p.low, p.in_low, in.low);
        mti_fetch<WIDE>(qkv, row, p.high, p.in_high, in.high);
        mti_fetch<WIDE>(table, position, p.angle, p.angles, in.cosine);
        mti_fetch<WIDE>(table, position, half + p.angle, p.angles, in.sine);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int, const input &in) const {
        float both[2 * MTI_VECTOR], cosine[MTI_VECTOR], sine[MTI_VECTOR];
        place p = at(col);
        mti_values(in.low, both);
        mti_values(in.high, both + MTI_VECTOR);
        mti_values(in.cosine, cosine);
        mti_values(in.sine, sine);
        mti_rotary_turn<PAIRS>(both, cosine, sine, sign);
        mti_store<WIDE, TYPE>(qkv, row, p.low, p.in_low, both);
        mti_store<WIDE, TYPE>(qkv, row, p.high, p.in_high, both + MTI_VECTOR);
    }
};

/* mti_rotary_op for packed documents. A kernel of its own keeps the search out of the kernel for sequences. */
template <int TYPE, bool PAIRS> struct mti_rotary_documents_op {
    typedef typename mti_rotary_op<TYPE, PAIRS>::input input;
    mti_rotary_op<TYPE, PAIRS> op;
    mt_attention_desc s;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int, input &in) const {
        int64_t b = mti_divide_by(row, op.seq);
        op.template fetch_at<WIDE>(row, mti_document_position(&s, b, row - b * op.seq.by), col, in);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        op.template finish<WIDE>(row, col, n, in);
    }
};

/* table = cosines and sines. A thread owns every (grid size)-th pair of a cosine and a sine, and computes it in double.
   The kernel uses no shared memory and no barrier. */
static __global__ void __launch_bounds__(256)
    mti_rotary_table_kernel(mti_view table, int64_t rows, int64_t half, double base) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < rows * half; i += step) {
        int64_t row = i / half, j = i % half;
        double angle = (double)row * pow(base, -2.0 * (double)j / (double)(2 * half));
        mti_put(table, row, j, (float)cos(angle));
        mti_put(table, row, half + j, (float)sin(angle));
    }
}

static mt_status mti_cuda_rotary_table(mt_context *ctx, float base, mt_tensor table) {
    int64_t items = table.rows * (table.cols / 2);
    if (items == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_rotary_table_kernel, mti_grid(items, 256), 256, 0, mt_context_stream(ctx), mti_view_of(table),
                     table.rows, table.cols / 2, (double)base);
    return mt_cuda_launched(ctx, "mt_rotary_table");
}

static mt_status mti_cuda_rotary(mt_context *ctx, const mt_attention_desc *s, mt_tensor table, float sign,
                                 mt_tensor qkv) {
    int64_t half = table.cols / 2, vectors = (half + MTI_VECTOR - 1) / MTI_VECTOR, turned = s->heads_per_group + 1;
    int64_t items = s->groups * turned * vectors;
    mti_access how = mti_access_of(qkv);
    /* rows for the positions in sequences, or for those in documents */
    mt_tensor of_tokens = s->cu_seqlens ? table : mt_tensor_rows(table, s->part.first_query, s->seq);
    if (half % MTI_VECTOR != 0 || s->head_dim % MTI_VECTOR != 0 || !mti_is_wide(table)) how.wide = 0;
    if (!how.wide || table.dtype != MT_F32) how.type = MTI_ANY_TYPE;
    if (qkv.rows * items == 0) return MT_SUCCESS;
    return mti_by_type(how.type, [&](auto type) {
        return mti_by_kind<2>(s->scores.rotary_form == MT_ROTARY_PAIRS, [&](auto pairs) {
            mti_rotary_op<type.value, pairs.value != 0> op = {mti_view_of(qkv),
                                                              mti_view_of(of_tokens),
                                                              s->head_dim,
                                                              half,
                                                              mti_divider_of(vectors, items),
                                                              mti_divider_of(turned, items),
                                                              mti_divider_of(s->seq, qkv.rows),
                                                              sign};
            if (!s->cu_seqlens)
                return mti_map_ahead<type.value, 1>(ctx, "mt_rotary", op, how.wide, qkv.rows, items * MTI_VECTOR);
            mti_rotary_documents_op<type.value, pairs.value != 0> of_documents = {op, *s};
            return mti_map_ahead<type.value, 1>(ctx, "mt_rotary", of_documents, how.wide, qkv.rows, items * MTI_VECTOR);
        });
    });
}

} /* extern "C++" */
#endif
