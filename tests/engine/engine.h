// engine.h - compiles CUDA kernels as C++ that runs on the CPU, with one fiber per CUDA thread. Test-only. g++ and
// clang++ include this file before the source (-include), so that it also precedes the library's headers:
//
//     g++ -x c++ -std=c++17 -isystem /usr/local/cuda/include -include tests/engine/engine.h -c file.cu
//     link with core.cpp runtime.cpp check.cpp (and blaslt.cpp nccl.cpp cudnn.cpp where needed) -lpthread
//
// Kernels are ordinary CUDA C++ with three rules: launch them with MT_LAUNCH_KERNEL, declare shared memory with
// MT_SHARED or MT_DYN_SHARED, and use one wrapper function per PTX instruction. Not supported: cooperative groups,
// __activemask, textures, and blocks that wait for other blocks (blocks run one after the other).
//
// Of compute capability 9.0 it has wgmma with tiles in the 128-byte swizzle, mbarriers, named barriers and setmaxnreg
// (hopper.h). The arrays of a product, accumulators and registers of A, must live until its wait. A register of A that
// is written after wgmma.fence but before the product is not seen.
//
// Environment variables select the order of kernels and stream operations, among the orders that CUDA permits:
//
//     MTE_THREADS   which thread of a block runs next: fifo (default), lifo, random
//     MTE_BLOCKS    the order in which blocks run: fifo (default), lifo, random
//     MTE_CP        when cp.async moves its data: late (default), early, random; always late with check.cpp
//     MTE_WGMMA     when wgmma reads its operands and computes: late (default): at the wait; early: when it is issued;
//                   random
//     MTE_STREAMS   when an operation runs: eager (default): as soon as it can; lazy: only when the host waits for it;
//                   greedy: while the host waits, operations that it does not wait for run first; random
//     MTE_SEED      seed of all random choices (0)
//     MTE_HOPPER    0: the program has no code for sm_90a, see mti_hopper_built (1)
//     MTE_PROTECT   1: host code that touches device memory crashes (0)
//     MTE_DEVICES   number of devices (8)
//     MTE_MEMORY    memory of each device in MiB (4096)
//     MTE_SHARED    shared memory that cudaFuncSetAttribute can allow a block, in KiB (227)
//     MTE_PATIENCE  seconds without progress after which the engine reports a deadlock (600)
//
// The engine reports each error as a line "ENGINE: ..." on stderr. A program with such a report exits with status 97.
#ifndef MTE_ENGINE_H
#define MTE_ENGINE_H

#define MT_CUDA_ENGINE 1

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <cuda_runtime.h>

// gcc's -fsanitize=thread, on which check.cpp builds, does not instrument `*p = f()` where f returns a structure and is
// not inlined. cuda_bf16.h and cuda_fp16.h declare their conversions `static __attribute__((unused))` for gcc; this
// macro makes them always_inline.
#define unused unused, always_inline
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#undef unused

#include "core.h"

// A kernel may call memcpy, memmove or memset, or copy a structure with them. These directives redirect the calls to
// check.cpp. clang ignores such directives: build.sh renames the symbols of its objects with objcopy.
#if defined(MTE_CHECK) && !defined(__clang__)
__asm__(".set memcpy, __tsan_memcpy\n.set memmove, __tsan_memmove\n.set memset, __tsan_memset");
#endif

#if defined(__clang__)
#define MTE_NOT_CHECKED __attribute__((no_sanitize("thread")))
#else
#define MTE_NOT_CHECKED __attribute__((no_sanitize_thread))
#endif

// ---- language ------------------------------------------------------------------------------------------------------

#define threadIdx (::mte::current->index)
#define blockIdx (::mte::block.index)
#define blockDim (::mte::block.size)
#define gridDim (::mte::block.grid)
#define warpSize 32

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ static_assert(false, "declare shared memory with MT_SHARED or MT_DYN_SHARED");

namespace mte {

template <class T> inline void collect_pointer(std::vector<const void *> &pointers, const T &argument) {
    if constexpr (std::is_pointer_v<T> && !std::is_function_v<std::remove_pointer_t<T>>)
        pointers.push_back((const void *)argument);
    else (void)pointers, (void)argument;
}

template <class... P> struct KernelCall {
    void (*kernel)(P...);
    std::tuple<std::decay_t<P>...> arguments;

    static void thread_main(const void *call) {
        const KernelCall *self = static_cast<const KernelCall *>(call);
        std::apply(self->kernel, self->arguments);
    }
};

template <class... P, class... A>
void launch_kernel(const char *name, void (*kernel)(P...), dim3 grid, dim3 threads, size_t dynamic_shared,
                   cudaStream_t stream, A &&...arguments) {
    typedef KernelCall<P...> Call;
    auto call = std::make_shared<Call>(Call{kernel, {static_cast<P>(arguments)...}});
    std::vector<const void *> pointers;
    std::apply([&](const auto &...each) { (collect_pointer(pointers, each), ...); }, call->arguments);
    launch((const void *)kernel, Launch{name, grid, threads, dynamic_shared, Call::thread_main, call, sizeof(Call)},
           stream, std::move(pointers));
}

} // namespace mte

// MT_LAUNCH_KERNEL(kernel, grid, block, dynamic_shared_bytes, stream, arguments...); errors: cudaGetLastError().
// A kernel with commas in its template arguments goes into parentheses.
#define MT_LAUNCH_KERNEL(kernel, grid, threads, dynamic_shared_bytes, ...)                                             \
    ::mte::launch_kernel(#kernel, kernel, grid, threads, dynamic_shared_bytes, __VA_ARGS__)

// MT_SHARED(float, tile, 32 * 33): float tile[32 * 33] in shared memory.
#define MT_SHARED(type, name, count)                                                                                   \
    static const char mte_site_of_##name = 0;                                                                          \
    type(&name)[count] = *reinterpret_cast<type(*)[count]>(                                                            \
        ::mte::shared_array(&mte_site_of_##name, sizeof(type) * (count), alignof(type), #name))

// The launch's dynamic shared memory, 128-byte aligned, and not more than that.
#define MT_DYN_SHARED(type, name) type *name = reinterpret_cast<type *>(::mte::block.dynamic_shared)

// ---- barriers, warp collectives ------------------------------------------------------------------------------------

// ptxas identifies a barrier by its place in the code, and so does the engine: each function takes the caller's place
// as a default argument.
#define MTE_PLACE ::mte::Where where = ::mte::Where::here()

inline void __syncthreads(MTE_PLACE) { ::mte::barrier(0, where); }
inline int __syncthreads_count(int predicate, MTE_PLACE) { return ::mte::barrier(predicate != 0, where); }
inline int __syncthreads_or(int predicate, MTE_PLACE) { return ::mte::barrier(predicate != 0, where) != 0; }
inline int __syncthreads_and(int predicate, MTE_PLACE) { return ::mte::barrier(predicate == 0, where) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu, MTE_PLACE) {
    ::mte::collective(::mte::complete_syncwarp, mask, nullptr, where);
}
inline void __threadfence() { ::mte::fence(); }
inline void __threadfence_system() { ::mte::fence(); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { ::mte::yield(); }
inline void __trap() { ::mte::fail("__trap()"); }

namespace mte {

template <class T> inline T shuffle(unsigned mask, T value, int source, Where where) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "CUDA shuffles values of up to 8 bytes");
    ShuffleOperands operands = {0, 0, source};
    std::memcpy(&operands.in, &value, sizeof(T));
    collective(complete_shuffle, mask, &operands, where);
    T result;
    std::memcpy(&result, &operands.out, sizeof(T));
    return result;
}

inline int segment_begin(int width) { return (int)current->lane & ~(width - 1); }
inline int segment_end(int width) { return segment_begin(width) + width; }

inline unsigned vote(unsigned mask, bool predicate, Where where) {
    VoteOperands operands = {predicate, 0};
    collective(complete_vote, mask, &operands, where);
    return operands.ballot;
}

} // namespace mte

template <class T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, MTE_PLACE) {
    return ::mte::shuffle(mask, value, ::mte::segment_begin(width) + (source & (width - 1)), where);
}

template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, MTE_PLACE) {
    int lane = (int)::mte::current->lane;
    int source = lane - (int)delta;
    return ::mte::shuffle(mask, value, source < ::mte::segment_begin(width) ? lane : source, where);
}

template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, MTE_PLACE) {
    int lane = (int)::mte::current->lane;
    int source = lane + (int)delta;
    return ::mte::shuffle(mask, value, source >= ::mte::segment_end(width) ? lane : source, where);
}

template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, MTE_PLACE) {
    int lane = (int)::mte::current->lane;
    int source = lane ^ lanes;
    return ::mte::shuffle(mask, value, source >= ::mte::segment_end(width) ? lane : source, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, MTE_PLACE) { return ::mte::vote(mask, predicate, where); }
inline int __any_sync(unsigned mask, int predicate, MTE_PLACE) { return ::mte::vote(mask, predicate, where) != 0; }
inline int __all_sync(unsigned mask, int predicate, MTE_PLACE) { return ::mte::vote(mask, !predicate, where) == 0; }

namespace mte {

template <class T> struct ReduceOperands {
    T in;
    T out;
};

template <class T, class F> void complete_reduce(Warp *warp, unsigned group) {
    T result = T();
    bool first = true;
    for (unsigned lane = 0; lane < warp_lanes; lane++) {
        if (!(group >> lane & 1)) continue;
        T in = static_cast<ReduceOperands<T> *>(warp->lanes[lane]->operands)->in;
        result = first ? in : F::apply(result, in);
        first = false;
    }
    for (unsigned lane = 0; lane < warp_lanes; lane++)
        if (group >> lane & 1) static_cast<ReduceOperands<T> *>(warp->lanes[lane]->operands)->out = result;
}

template <class F, class T> inline T reduce(unsigned mask, T value, Where where) {
    static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>, "CUDA reduces int and unsigned");
    ReduceOperands<T> operands = {value, T()};
    collective(complete_reduce<T, F>, mask, &operands, where);
    return operands.out;
}

} // namespace mte

#define MTE_OPERATION(name, expression)                                                                                \
    namespace mte {                                                                                                    \
    struct name {                                                                                                      \
        template <class T> MTE_NOT_CHECKED static T apply(T a, T b) { return (T)(expression); }                        \
    };                                                                                                                 \
    }
MTE_OPERATION(Add, a + b)
MTE_OPERATION(Subtract, a - b)
MTE_OPERATION(Minimum, b < a ? b : a)
MTE_OPERATION(Maximum, a < b ? b : a)
MTE_OPERATION(And, a &b)
MTE_OPERATION(Or, a | b)
MTE_OPERATION(Xor, a ^ b)
MTE_OPERATION(Exchange, ((void)a, b))
MTE_OPERATION(Increment, a >= b ? 0 : a + 1)
MTE_OPERATION(Decrement, a == 0 || a > b ? b : a - 1)
#undef MTE_OPERATION

#define MTE_REDUCE(name, operation)                                                                                    \
    template <class T> inline T name(unsigned mask, T value, MTE_PLACE) {                                              \
        return ::mte::reduce<::mte::operation>(mask, value, where);                                                    \
    }
MTE_REDUCE(__reduce_add_sync, Add)
MTE_REDUCE(__reduce_min_sync, Minimum)
MTE_REDUCE(__reduce_max_sync, Maximum)
MTE_REDUCE(__reduce_and_sync, And)
MTE_REDUCE(__reduce_or_sync, Or)
MTE_REDUCE(__reduce_xor_sync, Xor)
#undef MTE_REDUCE

// ---- atomics -------------------------------------------------------------------------------------------------------

namespace mte {

template <class T> struct Itself { typedef T type; };

template <class T>
constexpr bool has_atomics =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, float> || std::is_same_v<T, double> ||
    std::is_same_v<T, unsigned long long> || std::is_same_v<T, long long> || std::is_same_v<T, __half> ||
    std::is_same_v<T, __half2> || std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __nv_bfloat162>;

// Fibers switch only at barriers and collectives, so this read, update and write are atomic.
template <class F, class T> MTE_NOT_CHECKED inline T atomic_update(T *p, T operand) {
    static_assert(has_atomics<T>, "CUDA has no atomics on this type");
    access(current, p, sizeof(T), Access::atomic, __builtin_return_address(0));
    T old;
    __builtin_memcpy(&old, p, sizeof(T));
    T updated = F::apply(old, operand);
    __builtin_memcpy(p, &updated, sizeof(T));
    return old;
}

template <class T> MTE_NOT_CHECKED inline T atomic_compare_and_swap(T *p, T expected, T desired) {
    static_assert(has_atomics<T>, "CUDA has no atomics on this type");
    access(current, p, sizeof(T), Access::atomic, __builtin_return_address(0));
    T old;
    __builtin_memcpy(&old, p, sizeof(T));
    if (old == expected) __builtin_memcpy(p, &desired, sizeof(T));
    return old;
}

} // namespace mte

// The value is converted to the type of the pointer, as with CUDA's overloads.
#define MTE_ATOMIC(name, operation)                                                                                    \
    template <class T> inline T name(T *p, typename ::mte::Itself<T>::type value) {                                    \
        return ::mte::atomic_update<::mte::operation>(p, value);                                                       \
    }                                                                                                                  \
    template <class T> inline T name##_block(T *p, typename ::mte::Itself<T>::type value) {                            \
        return ::mte::atomic_update<::mte::operation>(p, value);                                                       \
    }
MTE_ATOMIC(atomicAdd, Add)
MTE_ATOMIC(atomicSub, Subtract)
MTE_ATOMIC(atomicMin, Minimum)
MTE_ATOMIC(atomicMax, Maximum)
MTE_ATOMIC(atomicAnd, And)
MTE_ATOMIC(atomicOr, Or)
MTE_ATOMIC(atomicXor, Xor)
MTE_ATOMIC(atomicExch, Exchange)
MTE_ATOMIC(atomicInc, Increment)
MTE_ATOMIC(atomicDec, Decrement)
#undef MTE_ATOMIC

template <class T>
inline T atomicCAS(T *p, typename ::mte::Itself<T>::type expected, typename ::mte::Itself<T>::type desired) {
    return ::mte::atomic_compare_and_swap(p, expected, desired);
}

// ---- loads, arithmetic ---------------------------------------------------------------------------------------------

template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldcs(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline void __stwb(T *p, typename ::mte::Itself<T>::type value) { *p = value; }
template <class T> inline void __stcs(T *p, typename ::mte::Itself<T>::type value) { *p = value; }
template <class T> inline void __stcg(T *p, typename ::mte::Itself<T>::type value) { *p = value; }

namespace mte {

template <class To, class From> inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Returns x. The compiler cannot contract the operation that computed x with one that uses it.
inline float rounded(float x) {
    __asm__("" : "+m"(x));
    return x;
}

inline float saturate(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline int leading_zeros(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int leading_zeros(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned reverse_bits(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}

} // namespace mte

// CUDA's min and max, for two numbers of one type.
template <class T> inline T min(T a, T b) {
    static_assert(std::is_arithmetic_v<T>, "min is for numbers");
    return b < a ? b : a;
}
template <class T> inline T max(T a, T b) {
    static_assert(std::is_arithmetic_v<T>, "max is for numbers");
    return a < b ? b : a;
}

// These are macros because the C library declares some of the names. The fast-math intrinsics compute the exact
// function.
#define __expf(x) ::expf(x)
#define __exp10f(x) ::exp10f(x)
#define __logf(x) ::logf(x)
#define __log2f(x) ::log2f(x)
#define __log10f(x) ::log10f(x)
#define __powf(x, y) ::powf(x, y)
#define __sinf(x) ::sinf(x)
#define __cosf(x) ::cosf(x)
#define __tanf(x) ::tanf(x)
#define __sincosf(x, s, c) ::sincosf(x, s, c)
#define rsqrtf(x) (1.0f / ::sqrtf(x))
#define rsqrt(x) (1.0 / ::sqrt(x))
#define __frsqrt_rn(x) (1.0f / ::sqrtf(x))
#define __frcp_rn(x) (1.0f / (float)(x))
#define __fsqrt_rn(x) ::sqrtf(x)
#define __fdividef(x, y) ((float)(x) / (float)(y))
#define __fdiv_rn(x, y) ((float)(x) / (float)(y))
#define __fadd_rn(x, y) ::mte::rounded((float)(x) + (float)(y))
#define __fsub_rn(x, y) ::mte::rounded((float)(x) - (float)(y))
#define __fmul_rn(x, y) ::mte::rounded((float)(x) * (float)(y))
#define __fmaf_rn(x, y, z) ::fmaf(x, y, z)
#define __saturatef(x) ::mte::saturate(x)
#define __float2int_rn(x) ((int)::rintf(x))
#define __float2int_rz(x) ((int)(x))
#define __float2int_rd(x) ((int)::floorf(x))
#define __float2int_ru(x) ((int)::ceilf(x))
#define __int2float_rn(x) ((float)(x))
#define __uint2float_rn(x) ((float)(x))
#define __float_as_int(x) ::mte::bits_as<int>((float)(x))
#define __float_as_uint(x) ::mte::bits_as<unsigned>((float)(x))
#define __int_as_float(x) ::mte::bits_as<float>((int)(x))
#define __uint_as_float(x) ::mte::bits_as<float>((unsigned)(x))
#define __double_as_longlong(x) ::mte::bits_as<long long>((double)(x))
#define __longlong_as_double(x) ::mte::bits_as<double>((long long)(x))
#define __popc(x) __builtin_popcount((unsigned)(x))
#define __popcll(x) __builtin_popcountll((unsigned long long)(x))
#define __clz(x) ::mte::leading_zeros((unsigned)(x))
#define __clzll(x) ::mte::leading_zeros((unsigned long long)(x))
#define __ffs(x) __builtin_ffs((int)(x))
#define __ffsll(x) __builtin_ffsll((long long)(x))
#define __brev(x) ::mte::reverse_bits(x)
#define __umulhi(x, y) ((unsigned)(((unsigned long long)(unsigned)(x) * (unsigned)(y)) >> 32))
#define __umul64hi(x, y)                                                                                               \
    ((unsigned long long)(((unsigned __int128)(unsigned long long)(x) * (unsigned long long)(y)) >> 64))

// ---- one wrapper per PTX instruction -------------------------------------------------------------------------------

// cp.async.cg.shared.global: copies source_bytes bytes and fills the rest of the 16 bytes with zeros.
inline void mti_cp_async16(void *shared_destination, const void *global_source, int source_bytes) {
    ::mte::copy_async(shared_destination, global_source, source_bytes);
}
inline void mti_cp_async_commit() { ::mte::copy_commit(); }
template <int N> inline void mti_cp_async_wait() { ::mte::copy_wait(N); }

// ex2.approx.ftz.f32
inline float mti_ex2(float x) {
    float y = ::exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

// rcp.approx.ftz.f32
inline float mti_reciprocal(float x) {
    const float y = 1.0f / (::fabsf(x) < 0x1p-126f ? ::copysignf(0.0f, x) : x);
    return ::fabsf(y) < 0x1p-126f ? ::copysignf(0.0f, y) : y;
}

// ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16
inline void mti_ldmatrix_x4(uint32_t *r, const void *row, MTE_PLACE) {
    ::mte::LdmatrixOperands operands = {r, row};
    ::mte::collective(::mte::complete_ldmatrix, 0xffffffffu, &operands, where);
}
inline void mti_ldmatrix_x4_trans(uint32_t *r, const void *row, MTE_PLACE) {
    ::mte::LdmatrixOperands operands = {r, row};
    ::mte::collective(::mte::complete_ldmatrix_trans, 0xffffffffu, &operands, where);
}

// mma.sync.aligned.m16n8k16.row.col.f32.{bf16.bf16,f16.f16}.f32: d += a b
inline void mti_mma_16816_bf16(float *d, const uint32_t *a, const uint32_t *b, MTE_PLACE) {
    ::mte::MmaOperands operands = {d, a, b};
    ::mte::collective(::mte::complete_mma_bf16, 0xffffffffu, &operands, where);
}
inline void mti_mma_16816_f16(float *d, const uint32_t *a, const uint32_t *b, MTE_PLACE) {
    ::mte::MmaOperands operands = {d, a, b};
    ::mte::collective(::mte::complete_mma_f16, 0xffffffffu, &operands, where);
}

// wgmma.mma_async.sync.aligned.m64nNk16.f32.{bf16.bf16,f16.f16}, and the instructions around it
template <class T> inline T *mti_align_1024(T *p) {
    return reinterpret_cast<T *>((reinterpret_cast<uintptr_t>(p) + 1023) / 1024 * 1024);
}
inline uint64_t mti_wgmma_tile(const void *tile, unsigned lead, unsigned stride) {
    return ::mte::wgmma_tile(tile, lead, stride);
}
template <int N, bool BF16, int TransB>
inline void mti_wgmma_ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int add, MTE_PLACE) {
    ::mte::wgmma({&d[0][0], nullptr, a, b, N, BF16, TransB != 0, add != 0}, where);
}
template <int N, bool BF16, int TransB>
inline void mti_wgmma_rs(float (&d)[N / 8][4], const uint32_t *a, uint64_t b, int add, MTE_PLACE) {
    ::mte::wgmma({&d[0][0], a, 0, b, N, BF16, TransB != 0, add != 0}, where);
}
inline void mti_wgmma_fence(MTE_PLACE) { ::mte::wgmma_fence(where); }
inline void mti_wgmma_commit(MTE_PLACE) { ::mte::wgmma_commit(where); }
template <int Pending> inline void mti_wgmma_wait(MTE_PLACE) { ::mte::wgmma_wait(Pending, where); }
inline void mti_fence_proxy_async() { ::mte::fence_proxy_async(); }

// setmaxnreg.{inc,dec}.sync.aligned.u32
template <int Registers> inline void mti_setmaxnreg_inc(MTE_PLACE) { ::mte::set_registers(Registers, true, where); }
template <int Registers> inline void mti_setmaxnreg_dec(MTE_PLACE) { ::mte::set_registers(Registers, false, where); }

// bar.sync and bar.arrive with a number of threads
inline void mti_named_sync(int id, int threads, MTE_PLACE) { ::mte::named_barrier(id, threads, true, where); }
inline void mti_named_arrive(int id, int threads, MTE_PLACE) { ::mte::named_barrier(id, threads, false, where); }

// mbarrier.init, mbarrier.arrive, and mbarrier.try_wait.parity in a loop
inline void mti_mbarrier_init(uint64_t *b, unsigned count) { ::mte::mbarrier_init(b, count); }
inline void mti_mbarrier_arrive(uint64_t *b, MTE_PLACE) { ::mte::mbarrier_arrive(b, where); }
inline void mti_mbarrier_wait(uint64_t *b, unsigned parity, MTE_PLACE) { ::mte::mbarrier_wait(b, parity, where); }

#undef MTE_PLACE

#endif // MTE_ENGINE_H
