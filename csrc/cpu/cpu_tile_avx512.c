/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tile kernels for AVX-512 (F, BW, VL, DQ): 24 sums of 16 lanes, 4 vectors of the right factor and
 * the broadcast fill 29 of the 32 registers. Compiles to nothing off x86-64.
 */
#if defined(__x86_64__)

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) ||                   \
    !defined(__AVX512DQ__) || !defined(__FMA__)
#error "compile cpu_tile_avx512.c with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma"
#endif

#include <immintrin.h>

#define VEC_LANES 16
#define VEC_FMA(a, b, c) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define VEC_FROM_BYTES(p)                                                                          \
    ((vec_bits)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i_u *)(const void *)(p))))
#define BLOCK_VECS 4
#define KERNELS kbmla_cpu_kernels_avx512
#define KERNELS_ISA "avx512"
#include "cpu_tile_impl.h"

#else
typedef int kbmla_cpu_tile_avx512_is_empty;
#endif
