/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tile kernels for any machine with 128-bit vectors: SSE2 on x86-64, Advanced SIMD on aarch64.
 * Also what the others are compared with. a * b + c is left to the compiler except on aarch64,
 * where -std=c11 would otherwise forbid the fused form that every such machine has.
 */
#if defined(__AVX__)
#error "compile cpu_tile_generic.c for the baseline, without -mavx flags"
#endif

#define VEC_LANES 4
#define VEC_FROM_BYTES(p) ((vec_bits){(p)[0], (p)[1], (p)[2], (p)[3]})
#if defined(__aarch64__)
#include <arm_neon.h>
#define VEC_FMA(a, b, c) ((vec)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define BLOCK_VECS 4
#else
#define VEC_FMA(a, b, c) ((a) * (b) + (c))
#define BLOCK_VECS 2
#endif
#define KERNELS kbmla_cpu_kernels_generic
#define KERNELS_ISA "generic"
#include "cpu_tile_impl.h"
