/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One short function per PTX instruction, of the kernels for sm_80 and later or of both backends;
 * those of sm_90 compile to nothing before it. Shared-memory addresses are 32-bit, from
 * smem_address().
 */
#ifndef KBMLA_CUDA_PTX_CUH
#define KBMLA_CUDA_PTX_CUH

#include <cuda_fp16.h>
#include <stdint.h>

/* All lanes, for the shuffles and votes of a whole warp. */
static const uint32_t FULL_WARP = 0xFFFFFFFFu;

static __device__ __forceinline__ uint32_t smem_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* A value that all lanes have, as one the compiler may keep in a uniform register: addresses and
 * loop bounds that follow from it cost no registers of the threads. */
static __device__ __forceinline__ int32_t uniform(int32_t value) {
    return __shfl_sync(FULL_WARP, value, 0);
}

/* The same value, of which the compiler knows nothing before this point: what follows from it is
 * not computed ahead, as of a loop, and the value itself is not computed again. */
static __device__ __forceinline__ int32_t from_here(int32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}
static __device__ __forceinline__ uint32_t from_here(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}
static __device__ __forceinline__ float from_here(float value) {
    asm volatile("" : "+f"(value));
    return value;
}
static __device__ __forceinline__ const int32_t *from_here(const int32_t *value) {
    asm volatile("" : "+l"(value));
    return value;
}

/* ---- asynchronous copies and their barriers */

/* What L2 is to make of the lines that a copy reads. */
static __device__ __forceinline__ uint64_t l2_evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}
static __device__ __forceinline__ uint64_t l2_evict_normal() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
    return policy;
}

/* 16 bytes global to shared, past L1. */
static __device__ __forceinline__ void cp_async_16(uint32_t smem, const void *gmem,
                                                   uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(smem),
                 "l"(gmem), "l"(policy)
                 : "memory");
}

/* Arrives on the barrier once all cp.async of this thread so far have landed. */
static __device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

static __device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
                 : "memory");
}

/* The same, announcing `bytes` of asynchronous copies or stores that the phase waits for as well;
 * SM90 on. */
static __device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
#endif
}

/* Whether the phase of parity `phase` has completed; from SM90 on the thread may sleep a while. */
static __device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t phase) {
    uint32_t done;
#if __CUDA_ARCH__ >= 900
#define MBARRIER_TEST "mbarrier.try_wait.parity.shared.b64"
#else
#define MBARRIER_TEST "mbarrier.test_wait.parity.shared.b64"
#endif
    asm volatile("{\n.reg .pred p;\n" MBARRIER_TEST " p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    return done != 0;
}

static __device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t phase) {
    while (!mbarrier_test(barrier, phase)) {
    }
}

/* bar.sync among `threads` threads of the block. */
static __device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The line of global memory around an address, into L2. */
static __device__ __forceinline__ void prefetch_l2(const void *gmem) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(gmem));
}

static __device__ __forceinline__ uint4 load_shared_16(uint32_t smem) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(smem)
                 : "memory");
    return value;
}

/* 16 bytes of the same word. */
static __device__ __forceinline__ void store_shared_16(uint32_t smem, uint32_t word) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(smem), "r"(word) : "memory");
}

/* Past L1, and as it is at this point: what another kernel may be writing. */
static __device__ __forceinline__ int32_t load_relaxed(const int32_t *gmem) {
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
    return x;
}

/* ---- matrices */

/* Four 8x8 matrices of 16-bit units, transposed; lane i gives the row address of matrix i / 8. */
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&reg)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
                 : "r"(smem)
                 : "memory");
}

/* c[16x8] += a[16x16] b[16x8], FP16 in, FP32 accumulators. */
static __device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- conversions */

static __device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two E4M3 bytes (the low 16 bits) to half2, exact; NaN stays NaN. */
static __device__ __forceinline__ uint32_t e4m3x2_to_half2(uint32_t bytes) {
    uint32_t halves;
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.rn.f16x2.e4m3x2 %0, lo;\n}"
        : "=r"(halves)
        : "r"(bytes));
#else
    /* The 7 magnitude bits as exponent and mantissa of a half are the value times 2^-8. */
    uint32_t spread = (bytes & 0xFFu) | (bytes & 0xFF00u) << 8;
    uint32_t small = (spread & 0x007F007Fu) << 7 | (spread & 0x00800080u) << 8;
    __half2 value = __hmul2(*reinterpret_cast<__half2 *>(&small), __float2half2_rn(256.0f));
    halves = *reinterpret_cast<uint32_t *>(&value);
    if ((spread & 0x0000007Fu) == 0x0000007Fu)
        halves |= 0x00007E00u;
    if ((spread & 0x007F0000u) == 0x007F0000u)
        halves |= 0x7E000000u;
#endif
    return halves;
}

/* E4M3(lo), E4M3(hi) as half2, round to nearest even, saturating; lo, hi >= 0 or NaN. */
static __device__ __forceinline__ uint32_t round_e4m3_half2(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
    uint32_t bytes;
    asm("{\n.reg .b16 pair;\ncvt.rn.satfinite.e4m3x2.f32 pair, %2, %1;\n"
        "mov.b32 %0, {pair, pair};\n}"
        : "=r"(bytes)
        : "f"(lo), "f"(hi));
    return e4m3x2_to_half2(bytes);
#else
    float value[2] = {lo, hi};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float x = value[i];
        uint32_t u = __float_as_uint(x);
        float normal = __uint_as_float((u + 0x7FFFFu + ((u >> 20) & 1u)) & ~0xFFFFFu);
        float subnormal = __fadd_rn(__fadd_rn(x, 0x1p14f), -0x1p14f);
        float y = x < 0x1p-6f ? subnormal : fminf(normal, 448.0f);
        value[i] = x == x ? y : x;
    }
    __half2 halves = __floats2half2_rn(value[0], value[1]);
    return *reinterpret_cast<uint32_t *>(&halves);
#endif
}

/* ---- clusters of blocks; nothing before SM90 */

/* Waits until all threads of the cluster are here and the barriers they made are known to it. */
static __device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;\n"
                 "barrier.cluster.arrive.relaxed.aligned;\n"
                 "barrier.cluster.wait.aligned;" ::
                     : "memory");
#endif
}

/* Stores a word to the shared memory of a block of the cluster, at this block's address, and tells
 * the barrier there of 4 bytes. */
static __device__ __forceinline__ void cluster_store(uint32_t smem, int32_t value, uint32_t barrier,
                                                     uint32_t block) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .b32 there, bar;\n"
                 "mapa.shared::cluster.u32 there, %0, %3;\n"
                 "mapa.shared::cluster.u32 bar, %2, %3;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 "
                 "[there], %1, [bar];\n}" ::"r"(smem),
                 "r"(value), "r"(barrier), "r"(block)
                 : "memory");
#endif
}

/* ---- programmatic dependent launch; nothing before SM90 */

/* Waits until the kernels this one depends on have finished and their writes are visible. */
static __device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The same with two pointers, not null, and an offset, not INT64_MIN, in hand: the wait hangs on
 * their values, or the compiler would work them out behind it. */
static __device__ __forceinline__ void grid_dependency_wait_with(const void *a, const void *b,
                                                                 int64_t offset) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u64 p, %0, 0;\nsetp.ne.and.u64 p, %1, 0, p;\n"
        "setp.ne.and.s64 p, %2, 0x8000000000000000, p;\n@p griddepcontrol.wait;\n}" ::"l"(a),
        "l"(b), "l"(offset)
        : "memory");
#endif
}

/* The same with two values in hand that are not INT64_MIN. */
static __device__ __forceinline__ void grid_dependency_wait_with(int64_t a, int64_t b) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nsetp.ne.s64 p, %0, 0x8000000000000000;\n"
                 "setp.ne.and.s64 p, %1, 0x8000000000000000, p;\n@p griddepcontrol.wait;\n}"
                 :
                 : "l"(a), "l"(b)
                 : "memory");
#endif
}

/* Lets the next kernel of the stream start launching; what this kernel writes it must not rely on
 * before its own wait. */
static __device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
