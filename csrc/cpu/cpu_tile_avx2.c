/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tile kernels for AVX2 with FMA: 12 sums of 8 lanes, 2 vectors of the right factor and the
 * broadcast fill 15 of the 16 registers. Compiles to nothing off x86-64.
 */
#if defined(__x86_64__)

#if !defined(__AVX2__) || !defined(__FMA__) || defined(__AVX512F__)
#error "compile cpu_tile_avx2.c with -mavx2 -mfma, and no more than that"
#endif

#include <immintrin.h>

#define VEC_LANES 8
#define VEC_FMA(a, b, c) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define VEC_FROM_BYTES(p) ((vec_bits)_mm256_cvtepu8_epi32(_mm_loadu_si64(p)))
#define BLOCK_VECS 2
#define KERNELS kbmla_cpu_kernels_avx2
#define KERNELS_ISA "avx2"
#include "cpu_tile_impl.h"

#else
typedef int kbmla_cpu_tile_avx2_is_empty;
#endif
