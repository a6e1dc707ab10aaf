/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scalar conversions of E4M3 (the "fn" variant: no infinities, NaN is 0x7F and 0xFF), BF16 and
 * FP16, rounding to nearest even: those of the CPU backend's stores, and the statement of the rule
 * that the vector code follows and the C tests hold it to.
 */
#ifndef KBMLA_E4M3_H
#define KBMLA_E4M3_H

#include <stdint.h>
#include <string.h>

static inline uint32_t kbmla_float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float kbmla_bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Exact. */
static inline float kbmla_e4m3_to_float(uint8_t byte) {
    uint32_t magnitude = byte & 0x7Fu, sign = (uint32_t)(byte & 0x80u) << 24;
    if (magnitude == 0x7Fu)
        return kbmla_bits_float(sign | 0x7FC00000u);
    if (magnitude < 8u) /* subnormal: multiples of 2^-9 */
        return kbmla_bits_float(sign | kbmla_float_bits((float)magnitude * 0x1p-9f));
    return kbmla_bits_float(sign | ((magnitude << 20) + (120u << 23)));
}

/* The value of E4M3(x) for x >= 0, saturating at 448. NaN stays NaN. */
static inline float kbmla_round_e4m3(float x) {
    if (x != x)
        return x;
    if (x < 0x1p-6f) /* subnormal range: adding 2^14 leaves a multiple of 2^-9 */
        return (x + 0x1p14f) - 0x1p14f;
    uint32_t u = kbmla_float_bits(x);
    u = (u + 0x7FFFFu + ((u >> 20) & 1u)) & ~0xFFFFFu;
    float y = kbmla_bits_float(u);
    return y > 448.0f ? 448.0f : y;
}

static inline uint16_t kbmla_float_to_bf16(float x) {
    uint32_t u = kbmla_float_bits(x);
    if (x != x)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

static inline float kbmla_bf16_to_float(uint16_t half) {
    return kbmla_bits_float((uint32_t)half << 16);
}

static inline uint16_t kbmla_float_to_fp16(float x) {
    uint32_t u = kbmla_float_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
    if (a > 0x7F800000u)
        return (uint16_t)(sign | 0x7E00u);
    if (a >= 0x477FF000u) /* rounds past 65504 */
        return (uint16_t)(sign | 0x7C00u);
    if (a < 0x38800000u) { /* subnormal: adding 0.5 leaves a multiple of 2^-24 */
        float y = kbmla_bits_float(a) + 0.5f;
        return (uint16_t)(sign | (kbmla_float_bits(y) - 0x3F000000u));
    }
    a += 0xFFFu + ((a >> 13) & 1u) - (112u << 23);
    return (uint16_t)(sign | (a >> 13));
}

static inline float kbmla_fp16_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, a = half & 0x7FFFu;
    if (a >= 0x7C00u)
        return kbmla_bits_float(sign | 0x7F800000u | (a & 0x3FFu) << 13);
    if (a < 0x400u)
        return kbmla_bits_float(sign | kbmla_float_bits((float)a * 0x1p-24f));
    return kbmla_bits_float(sign | ((a << 13) + (112u << 23)));
}

#endif
