/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tile kernels, written once over vectors of VEC_LANES floats (GCC/Clang vector extensions).
 * The including file defines VEC_LANES (4, 8 or 16), VEC_FMA(a, b, c) = a * b + c,
 * VEC_FROM_BYTES(p), the VEC_LANES bytes at p one per lane, BLOCK_VECS, the width of a block of
 * sums, and KERNELS and KERNELS_ISA, the name of the table and of its instruction set.
 *
 * A tile is 128 keys of 576 E4M3 bytes. It is widened to FP32 in panels of 64 columns:
 *     S[rows, keys] += Q[rows, 64] x K^T[64, keys]    9 panels, keys along the vectors
 *     P             = softmax step of S, per row
 *     O[rows, 64]   += P[rows, keys] x V[keys, 64]    8 panels, columns along the vectors
 * Both products are `multiply`, whose right factor is a panel in L1 and whose left factor is read
 * one broadcast element at a time. Every element of a product is summed over its depth in
 * increasing order, so no result depends on how rows are grouped.
 *
 * The softmax step is the numerics in README.md: lazy maximum, unrounded sum, P
 * rounded to E4M3. -inf is the only mask value. Maxima ignore NaN and sums carry it, so a NaN key
 * makes its row NaN without ever deciding a maximum.
 */
#ifndef KBMLA_CPU_TILE_IMPL_H
#define KBMLA_CPU_TILE_IMPL_H

#include <math.h>
#include <string.h>

#include "cpu_tile.h"

#ifdef __FAST_MATH__
#error "-ffast-math would drop the NaN tests and the rounding by addition"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the key transposition takes four E4M3 bytes out of a little-endian word"
#endif

typedef float vec __attribute__((vector_size(4 * VEC_LANES)));
typedef uint32_t vec_bits __attribute__((vector_size(4 * VEC_LANES)));
typedef int32_t vec_mask __attribute__((vector_size(4 * VEC_LANES))); /* lanes 0 or -1 */

#define INLINE static inline __attribute__((always_inline))
#define BLOCK_ROWS 6
#define BLOCK_COLS (BLOCK_VECS * VEC_LANES)

/* ------------------------------------------------------------------ vectors */

INLINE vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v) {
    memcpy(to, &v, sizeof v);
}

INLINE vec splat(float x) {
    return x - (vec){0};
}

INLINE vec choose(vec_mask mask, vec yes, vec no) {
    return (vec)((mask & (vec_mask)yes) | (~mask & (vec_mask)no));
}

/* The larger; `kept` where `x` is NaN. */
INLINE vec max_ignoring_nan(vec kept, vec x) {
    return choose(x > kept, x, kept);
}

INLINE float lanes_max(vec v) {
    float lane[VEC_LANES];
    memcpy(lane, &v, sizeof v);
    for (int half = VEC_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

INLINE float lanes_sum(vec v) {
    float lane[VEC_LANES];
    memcpy(lane, &v, sizeof v);
    for (int half = VEC_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

/*
 * 2^x for x <= 127, within 1 ulp; exact at integers, 0 below 2^-126, NaN for NaN.
 * x = n + f with n the nearest integer; the polynomial is the minimax fit of 2^f on [-1/2, 1/2]
 * with constant term 1. The power of two is multiplied in: an addition to the exponent would turn
 * a NaN into a number.
 */
INLINE vec exp2_lanes(vec x) {
    const float round_magic = 0x1.8p23f;
    vec shifted = x + round_magic;
    vec f = x - (shifted - round_magic);
    vec_bits power = ((vec_bits)shifted - 0x4B400000u + 127u) << 23;
    vec p = splat(0x1.41fbbcp-13f);
    p = VEC_FMA(p, f, splat(0x1.5f3e52p-10f));
    p = VEC_FMA(p, f, splat(0x1.3b2d4cp-7f));
    p = VEC_FMA(p, f, splat(0x1.c6aee8p-5f));
    p = VEC_FMA(p, f, splat(0x1.ebfbdcp-3f));
    p = VEC_FMA(p, f, splat(0x1.62e430p-1f));
    p = VEC_FMA(p, f, splat(1.0f));
    return choose(x < -126.0f, splat(0.0f), p * (vec)power);
}

/*
 * kbmla_round_e4m3 on lanes: x >= 0 to the nearest E4M3 value, ties to even, at most 448.
 * Adding 2^20 times the binade of x leaves 3 bits below its leading one; the binade is taken as
 * at least 2^-6, which is the spacing of the subnormals.
 */
INLINE vec round_e4m3_lanes(vec x) {
    const vec_bits least = (vec_bits){0} + 0x3C800000u;
    x = choose(x > 448.0f, splat(448.0f), x);
    vec_bits binade = (vec_bits)x & 0x7F800000u;
    binade = (vec_bits)choose((vec_mask)(binade > least), (vec)binade, (vec)least);
    vec magic = (vec)(binade + (20u << 23));
    return (x + magic) - magic;
}

/*
 * E4M3 bytes, one per 32-bit lane, to their values. The exponent moves by integer addition; a
 * subnormal m * 2^-9 comes out as 2^-7 * (1 + m/8) and is put right by 2 * x - 2^-6, both exact.
 */
INLINE vec widen_lanes(vec_bits byte) {
    vec_bits magnitude = byte & 0x7Fu;
    vec normal = (vec)((magnitude << 20) + (120u << 23));
    vec subnormal = VEC_FMA(normal, splat(2.0f), splat(-0x1p-6f));
    vec_bits bits = (vec_bits)choose((vec_mask)(magnitude < 8u), subnormal, normal);
    bits |= (vec_bits)(magnitude == 0x7Fu) & 0x7FC00000u;
    return (vec)(bits | (byte & 0x80u) << 24);
}

INLINE vec widen_bytes(const uint8_t *bytes) {
    return widen_lanes(VEC_FROM_BYTES(bytes));
}

/* Lanes of a and b taken in turn: the lower halves, the upper halves. */
#if VEC_LANES == 16
#define INTERLEAVE_LOW(a, b)                                                                       \
    __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define INTERLEAVE_HIGH(a, b)                                                                      \
    __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif VEC_LANES == 8
#define INTERLEAVE_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define INTERLEAVE_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define INTERLEAVE_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define INTERLEAVE_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif

/* Transposes the square of words: each pass interleaves the first half of the vectors with the
 * second half, which rotates the bits of (vector, lane) by one place. */
INLINE void transpose(vec_bits word[VEC_LANES]) {
    for (int pass = 1; pass < VEC_LANES; pass *= 2) {
        vec_bits next[VEC_LANES];
        for (int i = 0; i < VEC_LANES / 2; i++) {
            next[2 * i] = INTERLEAVE_LOW(word[i], word[i + VEC_LANES / 2]);
            next[2 * i + 1] = INTERLEAVE_HIGH(word[i], word[i + VEC_LANES / 2]);
        }
        memcpy(word, next, sizeof next);
    }
}

/* ------------------------------------------------------------------ panels */

/*
 * panel[64, 128] = transpose of columns column .. column + 64 of the first num_keys keys. Whole
 * vectors of keys are written, so up to VEC_LANES - 1 stale ones follow the last.
 * Words of four bytes are transposed, and their bytes taken apart after that.
 */
static void widen_keys(const kbmla_cpu_scratch *scratch, int column, int num_keys, float *panel) {
    for (int key = 0; key < num_keys; key += VEC_LANES) {
        for (int part = 0; part < KBMLA_CPU_PANEL; part += 4 * VEC_LANES) {
            vec_bits word[VEC_LANES];
            for (int i = 0; i < VEC_LANES; i++)
                memcpy(&word[i], &scratch->tile[key + i][column + part], sizeof word[i]);
            transpose(word);
            float *to = panel + part * KBMLA_TILE_TOKENS + key;
            for (int i = 0; i < VEC_LANES; i++)
                for (int byte = 0; byte < 4; byte++, to += KBMLA_TILE_TOKENS)
                    store(to, widen_lanes((word[i] >> (8 * byte)) & 0xFFu));
        }
    }
}

/* panel[num_keys, 64] = columns column .. column + 64 of the first num_keys keys. */
static void widen_values(const kbmla_cpu_scratch *scratch, int column, int num_keys, float *panel) {
    for (int key = 0; key < num_keys; key++, panel += KBMLA_CPU_PANEL)
        for (int i = 0; i < KBMLA_CPU_PANEL; i += VEC_LANES)
            store(panel + i, widen_bytes(&scratch->tile[key][column + i]));
}

static void widen(const uint8_t *bytes, float *values, int count) {
    for (int i = 0; i < count; i += VEC_LANES)
        store(values + i, widen_bytes(bytes + i));
}

/* ------------------------------------------------------------------ products */

/* A row-major matrix within a larger one; the stride counts elements. */
typedef struct matrix {
    float *data;
    int stride;
} matrix;

/* sum[rows, BLOCK_COLS] (+)= left[rows, depth] * right[depth, BLOCK_COLS], the sums in registers:
 * `rows` is a constant in each use. */
INLINE void multiply_block(int rows, int depth, const float *left, int left_stride,
                           const float *right, int right_stride, float *sum, int sum_stride,
                           int is_first) {
    vec acc[BLOCK_ROWS][BLOCK_VECS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < BLOCK_VECS; j++)
            acc[i][j] = is_first ? splat(0.0f) : load(sum + i * sum_stride + j * VEC_LANES);

    for (int k = 0; k < depth; k++, left++, right += right_stride) {
        vec factor[BLOCK_VECS];
#pragma GCC unroll 8
        for (int j = 0; j < BLOCK_VECS; j++)
            factor[j] = load(right + j * VEC_LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vec element = splat(left[i * left_stride]);
#pragma GCC unroll 8
            for (int j = 0; j < BLOCK_VECS; j++)
                acc[i][j] = VEC_FMA(element, factor[j], acc[i][j]);
        }
    }

#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < BLOCK_VECS; j++)
            store(sum + i * sum_stride + j * VEC_LANES, acc[i][j]);
}

/* sum[rows, columns] (+)= left[rows, depth] * right[depth, columns], columns rounded up to whole
 * blocks. The right factor is the one that stays in L1, so rows are the outer loop. */
static void multiply(int rows, int columns, int depth, matrix left, matrix right, matrix sum,
                     int is_first) {
    int block = 0;
    for (int row = 0; row < rows; row += block) {
        int rest = rows - row;
        /* Two blocks of similar height beat a full one and a remainder. */
        block = rest >= 2 * BLOCK_ROWS || rest == BLOCK_ROWS ? BLOCK_ROWS
                : rest > BLOCK_ROWS                          ? (rest + 1) / 2
                                                             : rest;
        const float *from = left.data + row * left.stride;
        for (int column = 0; column < columns; column += BLOCK_COLS) {
            const float *factor = right.data + column;
            float *to = sum.data + row * sum.stride + column;
#define MULTIPLY_BLOCK(n)                                                                          \
    case n:                                                                                        \
        multiply_block(n, depth, from, left.stride, factor, right.stride, to, sum.stride,          \
                       is_first);                                                                  \
        break
            switch (block) {
                MULTIPLY_BLOCK(1);
                MULTIPLY_BLOCK(2);
                MULTIPLY_BLOCK(3);
                MULTIPLY_BLOCK(4);
                MULTIPLY_BLOCK(5);
                MULTIPLY_BLOCK(6);
            }
#undef MULTIPLY_BLOCK
        }
    }
}

/* ------------------------------------------------------------------ softmax */

/*
 * Takes row_max up to tile_max if it grew past the allowance, rescaling what was summed under the
 * old one, and returns the maximum to subtract from the scores. A row that has seen nothing yet
 * subtracts 0 instead of -inf: its masked scores stay -inf, where -inf - -inf would be NaN.
 */
INLINE float settle_max(kbmla_cpu_scratch *scratch, int row, float tile_max,
                        const kbmla_cpu_softmax *softmax) {
    float old_max = scratch->row_max[row];
    if (tile_max > old_max && !((tile_max - old_max) * softmax->scale_log2 <= softmax->allowance)) {
        /* An old maximum of -inf gives a factor of 0 for sums that are 0 or NaN. */
        float factor = exp2f((old_max - tile_max) * softmax->scale_log2);
        scratch->row_max[row] = tile_max;
        scratch->row_sum[row] *= factor;
        float *out = scratch->out[row];
        for (int i = 0; i < KBMLA_HEAD_DIM_V; i += VEC_LANES)
            store(out + i, load(out + i) * factor);
    }
    return scratch->row_max[row] == -INFINITY ? 0.0f : scratch->row_max[row];
}

/* Turns the scores of a row into P8 and adds the unrounded p to row_sum. */
static void softmax_row(kbmla_cpu_scratch *scratch, int row, int first_key, int num_keys,
                        const kbmla_cpu_softmax *softmax) {
    float *score = scratch->score[row];
    int visible = scratch->visible[row] - first_key;

    /* Also where the last vector reaches past the keys: no row sees those lanes. */
    if (visible < num_keys || num_keys % VEC_LANES != 0) {
        vec_mask key = {0};
        for (int i = 0; i < VEC_LANES; i++)
            key[i] = i;
        for (int i = 0; i < num_keys; i += VEC_LANES, key += VEC_LANES)
            store(score + i, choose(key < visible, load(score + i), splat(-INFINITY)));
    }

    vec largest = splat(-INFINITY);
    for (int i = 0; i < num_keys; i += VEC_LANES)
        largest = max_ignoring_nan(largest, load(score + i));
    float row_max = settle_max(scratch, row, lanes_max(largest), softmax);

    /* The difference is taken before the scale: exact where scores are near the maximum, even at
     * raw scores of 1e7, where rounding S * scale first would cost whole percents of p. */
    vec sum = splat(0.0f);
    for (int i = 0; i < num_keys; i += VEC_LANES) {
        vec p = exp2_lanes((load(score + i) - row_max) * softmax->scale_log2);
        sum += p;
        store(score + i, round_e4m3_lanes(p * softmax->p_scale));
    }
    scratch->row_sum[row] += lanes_sum(sum);
}

/* ------------------------------------------------------------------ the step */

static void attend_tile(kbmla_cpu_scratch *scratch, int rows, int first_key, int num_keys,
                        const kbmla_cpu_softmax *softmax) {
    const matrix score = {scratch->score[0], KBMLA_TILE_TOKENS};
    const matrix keys = {scratch->panel, KBMLA_TILE_TOKENS};
    const matrix values = {scratch->panel, KBMLA_CPU_PANEL};
    /* The scores cover whole blocks of keys. Those past num_keys come from stale bytes: each is a
     * column of its own, the softmax selects them away, and the second product stops before. */
    for (int column = 0; column < KBMLA_HEAD_DIM_QK; column += KBMLA_CPU_PANEL) {
        const matrix query = {&scratch->query[0][column], KBMLA_HEAD_DIM_QK};
        widen_keys(scratch, column, num_keys, scratch->panel);
        multiply(rows, num_keys, KBMLA_CPU_PANEL, query, keys, score, column == 0);
    }
    for (int row = 0; row < rows; row++)
        softmax_row(scratch, row, first_key, num_keys, softmax);
    for (int column = 0; column < KBMLA_HEAD_DIM_V; column += KBMLA_CPU_PANEL) {
        const matrix out = {&scratch->out[0][column], KBMLA_HEAD_DIM_V};
        widen_values(scratch, column, num_keys, scratch->panel);
        multiply(rows, KBMLA_CPU_PANEL, num_keys, score, values, out, 0);
    }
}

extern const kbmla_cpu_kernels KERNELS;
const kbmla_cpu_kernels KERNELS = {KERNELS_ISA, widen, attend_tile};

#endif
