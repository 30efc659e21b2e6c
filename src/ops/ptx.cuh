/* ---- wrappers of PTX instructions -------------------------------------------------------------------------------- */

#pragma once
#include "system.h"

/* Whether code that is compiled now may use the instructions of sm_80. It is 1 in code for the host, too. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define MTI_HAS_SM80 1
#else
#define MTI_HAS_SM80 0
#endif

#if MT_HAS_CUDA
extern "C++" {

#if !defined(MT_CUDA_ENGINE) /* tests/engine/ defines these functions itself */
#if MTI_HAS_SM80
#define MTI_PTX_SM80(...) asm volatile(__VA_ARGS__)
#else
#define MTI_PTX_SM80(...) __trap() /* not reached: see mti_built_for */
#endif
/* Code that is built for less than sm_80 has no asynchronous copies. It runs the statement `now` instead, because
   norms use these wrappers there, too. */
#if MTI_HAS_SM80
#define MTI_PTX_COPY(now, ...) asm volatile(__VA_ARGS__)
#else
#define MTI_PTX_COPY(now, ...) now
#endif

static __device__ __forceinline__ uint32_t mti_shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Starts copying 16 bytes from global to shared memory. Only `bytes` bytes are read, and the rest of the 16 becomes 0.
   Code built for less than sm_80 copies before it goes on, and `bytes` must be 0 or 16. */
static __device__ __forceinline__ void mti_cp_async16(void *to, const void *from, int bytes) {
    MTI_PTX_COPY(*(uint4 *)to = bytes ? *(const uint4 *)from : make_uint4(0, 0, 0, 0),
                 "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(mti_shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void mti_cp_async_commit() {
    MTI_PTX_COPY((void)0, "cp.async.commit_group;" ::: "memory");
}
/* Waits until at most `Pending` committed groups of this thread are still in flight. */
template <int Pending> static __device__ __forceinline__ void mti_cp_async_wait() {
    MTI_PTX_COPY((void)0, "cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/* Loads four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8. */
static __device__ __forceinline__ void mti_ldmatrix_x4(uint32_t *r, const void *row) {
    MTI_PTX_SM80("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(mti_shared_address(row))
                 : "memory");
}
static __device__ __forceinline__ void mti_ldmatrix_x4_trans(uint32_t *r, const void *row) {
    MTI_PTX_SM80("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(mti_shared_address(row))
                 : "memory");
}

/* d [16, 8] += a [16, 16] b [16, 8] */
static __device__ __forceinline__ void mti_mma_16816_bf16(float *d, const uint32_t *a, const uint32_t *b) {
    MTI_PTX_SM80("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
static __device__ __forceinline__ void mti_mma_16816_f16(float *d, const uint32_t *a, const uint32_t *b) {
    MTI_PTX_SM80("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* 2^x, within 2 units in the last place. Subnormal results become 0. */
static __device__ __forceinline__ float mti_ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x, within 1 unit in the last place. Subnormal arguments count as 0, and subnormal results become 0. */
static __device__ __forceinline__ float mti_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#undef MTI_PTX_SM80
#undef MTI_PTX_COPY
#endif

} /* extern "C++" */
#endif
