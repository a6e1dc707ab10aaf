/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of one work item on the CPU: what cpu_decode.c asks of an instruction set.
 *
 * cpu_decode.c owns the walk, the page table and the output; a kernel table owns everything that
 * touches 128 x 576 numbers. cpu_tile_impl.h is the one source of the kernels. It is compiled once
 * per instruction set, by cpu_tile_avx512.c, cpu_tile_avx2.c and cpu_tile_generic.c, and cpu_isa.c
 * picks a table at run time. Tables differ in rounding only, by their order of summation.
 */
#ifndef KBMLA_CPU_TILE_H
#define KBMLA_CPU_TILE_H

#include <stdint.h>

#include "../kbmla.h"

/* Columns of a tile that are widened to FP32 at a time. 64 x 128 floats are 32 KiB: with the few
 * query rows in flight they stay in a 48 KiB L1, and 64 divides both 576 and 512. */
#define KBMLA_CPU_PANEL 64

/*
 * State of one work item, on the stack of the thread that runs it: 714 KiB of the 1 MiB that
 * kbmla.h asks for. Rows are those of the q tile; only the first `rows` of each array are used.
 * Every array starts on a 64-byte boundary.
 */
typedef struct kbmla_cpu_scratch {
    _Alignas(64) float query[KBMLA_MAX_TILE_ROWS][KBMLA_HEAD_DIM_QK];
    float out[KBMLA_MAX_TILE_ROWS][KBMLA_HEAD_DIM_V];    /* sum of P8 * V, times p_scale */
    float score[KBMLA_MAX_TILE_ROWS][KBMLA_TILE_TOKENS]; /* S of the tile, then its P8 */
    float panel[KBMLA_CPU_PANEL * KBMLA_TILE_TOKENS];    /* FP32 piece of the tile */
    float row_max[KBMLA_MAX_TILE_ROWS];                  /* the retained m, raw scores */
    float row_sum[KBMLA_MAX_TILE_ROWS];                  /* l: sum of unrounded p */
    int32_t visible[KBMLA_MAX_TILE_ROWS];                /* leading keys that the row sees */
    uint8_t tile[KBMLA_TILE_TOKENS][KBMLA_HEAD_DIM_QK];  /* E4M3; stale past the last key */
} kbmla_cpu_scratch;

typedef struct kbmla_cpu_softmax {
    float scale_log2; /* softmax_scale * log2(e) */
    float allowance;  /* growth of m, in powers of two, that is left alone: 8 - log2(p_scale) */
    float p_scale;
} kbmla_cpu_softmax;

typedef struct kbmla_cpu_kernels {
    const char *isa;

    /* values[i] = E4M3 value of bytes[i]; count is a multiple of 64. */
    void (*widen)(const uint8_t *bytes, float *values, int count);

    /* One step of the online softmax: keys first_key .. first_key + num_keys of the request are
     * in scratch->tile. Updates out, row_max and row_sum of `rows` rows; 1 <= num_keys <= 128. */
    void (*attend_tile)(kbmla_cpu_scratch *scratch, int rows, int first_key, int num_keys,
                        const kbmla_cpu_softmax *softmax);
} kbmla_cpu_kernels;

#endif
