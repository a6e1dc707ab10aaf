/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One short function per PTX instruction that the SM90 kernels alone use, no logic; the others are
 * in cuda/cuda_ptx.cuh. Shared-memory addresses are 32-bit, from smem_address().
 */
#ifndef KBMLA_SM90_PTX_CUH
#define KBMLA_SM90_PTX_CUH

#include "../cuda/cuda_ptx.cuh"

#include <cuda.h> /* CUtensorMap, a type only: nothing of the driver is linked */

/* ---- barriers and fences */

/* One lane of a warp that has arrived here whole. */
static __device__ __forceinline__ bool is_elected() {
    uint32_t is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(is)::"memory");
    return is != 0;
}

/* As mbarrier_test, without sleeping. */
static __device__ __forceinline__ bool mbarrier_poll(uint32_t barrier, uint32_t phase) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    return done != 0;
}

/* Makes mbarrier.init visible to the asynchronous proxy. */
static __device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Orders this thread's plain writes to shared memory before later reads of wgmma (PTX ISA,
 * "Proxies"). */
static __device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- bulk tensor copies, global to shared */

static __device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

static __device__ __forceinline__ void tma_load_3d(uint32_t smem, const CUtensorMap *map, int32_t x,
                                                   int32_t y, int32_t z, uint32_t barrier,
                                                   uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(smem),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
                 : "memory");
}

static __device__ __forceinline__ void tma_load_4d(uint32_t smem, const CUtensorMap *map, int32_t x,
                                                   int32_t y, int32_t z, int32_t w,
                                                   uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(smem),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(policy)
                 : "memory");
}

/* ---- 16-byte copies */

/* As cp_async_16; with `bytes` 0 nothing is read and zeros are written. */
static __device__ __forceinline__ void cp_async_16_or_zero(uint32_t smem, const void *gmem,
                                                           uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most GROUPS of this thread's groups are still on their way. */
template <int GROUPS> static __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

/* ---- values in shared memory */

static __device__ __forceinline__ uint32_t load_shared_u32(uint32_t smem) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(smem) : "memory");
    return x;
}
static __device__ __forceinline__ float load_shared_f32(uint32_t smem) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(smem) : "memory");
    return x;
}
static __device__ __forceinline__ float2 load_shared_f32x2(uint32_t smem) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(smem) : "memory");
    return x;
}
/* Under a predicate: an if around the store becomes a branch. */
static __device__ __forceinline__ void store_shared_f32_if(bool condition, uint32_t smem, float x) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.shared.f32 [%1], %2;\n}" ::"r"(
                     (uint32_t)condition),
                 "r"(smem), "f"(x)
                 : "memory");
}

/* ---- matrices of 8x8 16-bit units, registers to shared */

static __device__ __forceinline__ void stmatrix_x4(uint32_t smem, uint32_t a, uint32_t b,
                                                   uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

/* The same of transposed matrices, four or two. */
static __device__ __forceinline__ void stmatrix_x4_trans(uint32_t smem, uint32_t a, uint32_t b,
                                                         uint32_t c, uint32_t d) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}
static __device__ __forceinline__ void stmatrix_x2_trans(uint32_t smem, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(smem),
                 "r"(a), "r"(b)
                 : "memory");
}

/* E4M3(lo) | E4M3(hi) << 8, round to nearest even, saturating. */
static __device__ __forceinline__ uint32_t pack_e4m3x2(float lo, float hi) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
    return pair;
}

/* ---- registers of a warpgroup's threads; all its warps execute it */

template <int REGISTERS> static __device__ __forceinline__ void warpgroup_take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> static __device__ __forceinline__ void warpgroup_give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* ---- wgmma: groups of asynchronous products of a warpgroup */

/* Before the first product of a group that reads or accumulates registers. */
static __device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until at most GROUPS groups are still running. */
template <int GROUPS> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

/* Keeps the compiler from moving these registers across the point: wgmma writes them unseen. */
template <int COUNT> static __device__ __forceinline__ void hold_registers(float (&reg)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(reg[i])::"memory");
}

/* The same of what wgmma reads: complete before its fence. */
static __device__ __forceinline__ void hold_fragments(uint32_t (&reg)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile("" : "+r"(reg[i / 4][i % 4])::"memory");
}

/*
 * d[64 x N] (+)= a[64 x 32] b[N x 32]^T on E4M3, FP32 accumulators: d[4j + 2h + c] of a lane is row
 * 16 * warp + lane / 4 + 8h, column 8j + 2 * (lane % 4) + c. Operands in shared memory are K-major,
 * as descriptors say. Without `is_sum` d is overwritten.
 */
#define WGMMA_OUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_OUT_8(d, i) WGMMA_OUT_4(d, i), WGMMA_OUT_4(d, i + 4)
#define WGMMA_OUT_12(d, i) WGMMA_OUT_8(d, i), WGMMA_OUT_4(d, i + 8)
#define WGMMA_OUT_16(d, i) WGMMA_OUT_8(d, i), WGMMA_OUT_8(d, i + 8)
#define WGMMA_OUT_20(d, i) WGMMA_OUT_16(d, i), WGMMA_OUT_4(d, i + 16)
#define WGMMA_OUT_24(d, i) WGMMA_OUT_16(d, i), WGMMA_OUT_8(d, i + 16)
#define WGMMA_OUT_28(d, i) WGMMA_OUT_24(d, i), WGMMA_OUT_4(d, i + 24)
#define WGMMA_OUT_32(d, i) WGMMA_OUT_16(d, i), WGMMA_OUT_16(d, i + 16)

#define WGMMA_REG_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_REG_12 WGMMA_REG_8 ", %8, %9, %10, %11"
#define WGMMA_REG_16 WGMMA_REG_12 ", %12, %13, %14, %15"
#define WGMMA_REG_20 WGMMA_REG_16 ", %16, %17, %18, %19"
#define WGMMA_REG_24 WGMMA_REG_20 ", %20, %21, %22, %23"
#define WGMMA_REG_28 WGMMA_REG_24 ", %24, %25, %26, %27"
#define WGMMA_REG_32 WGMMA_REG_28 ", %28, %29, %30, %31"

/* `a` in shared memory, ss, or in registers, rs. */
template <int N> struct wgmma_e4m3;

/* The numbers of the operands behind `COUNT` accumulators follow from it: A .. F. */
#define DEFINE_WGMMA_E4M3(N, COUNT, A, B, C, D, E, F)                                              \
    template <> struct wgmma_e4m3<N> {                                                             \
        static __device__ __forceinline__ void ss(float (&d)[COUNT], uint64_t a, uint64_t b,       \
                                                  int is_sum) {                                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\n"                          \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                    \
                         "k32.f32.e4m3.e4m3 {" WGMMA_REG_##COUNT "}, %" #A ", %" #B                \
                                                                 ", p, 1, 1;\n}"                   \
                         : WGMMA_OUT_##COUNT(d, 0)                                                 \
                         : "l"(a), "l"(b), "r"(is_sum));                                           \
        }                                                                                          \
        static __device__ __forceinline__ void rs(float (&d)[COUNT], const uint32_t (&a)[4],       \
                                                  uint64_t b, int is_sum) {                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F ", 0;\n"                          \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                    \
                         "k32.f32.e4m3.e4m3 {" WGMMA_REG_##COUNT                                   \
                         "}, {%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", p, 1, 1;\n}"           \
                         : WGMMA_OUT_##COUNT(d, 0)                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_sum));       \
        }                                                                                          \
    }

DEFINE_WGMMA_E4M3(16, 8, 8, 9, 10, 11, 12, 13);
DEFINE_WGMMA_E4M3(24, 12, 12, 13, 14, 15, 16, 17);
DEFINE_WGMMA_E4M3(32, 16, 16, 17, 18, 19, 20, 21);
DEFINE_WGMMA_E4M3(40, 20, 20, 21, 22, 23, 24, 25);
DEFINE_WGMMA_E4M3(48, 24, 24, 25, 26, 27, 28, 29);
DEFINE_WGMMA_E4M3(56, 28, 28, 29, 30, 31, 32, 33);
DEFINE_WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37);

#endif
