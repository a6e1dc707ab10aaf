/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Torch-free tests of the C core: conversions, integer rules, sizes, and the CPU decode and reduce
 * on every instruction set of the machine. Prints "N passed, N failed" as its last line.
 *
 * Built twice: under the address and undefined-behaviour sanitizers, and plain with the allocator
 * wrapped (-DKBMLA_COUNT_ALLOCATIONS -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc), which shows
 * that a decode allocates nothing. An argument names one instruction set to run alone.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */

#include <sys/mman.h>

#include "check.h"
#include "decode_case.h"
#include "e4m3.h"
#include "internal.h"
#include "cpu/cpu_isa.h"

/* The lane functions of the tile kernels, at the width every machine has. */
#define VEC_LANES 4
#define VEC_FROM_BYTES(p) ((vec_bits){(p)[0], (p)[1], (p)[2], (p)[3]})
#define VEC_FMA(a, b, c) ((a) * (b) + (c))
#define BLOCK_VECS 2
#define KERNELS test_kernels
#define KERNELS_ISA "test"
#include "cpu/cpu_tile_impl.h"

#ifdef KBMLA_COUNT_ALLOCATIONS
static atomic_int num_allocations;
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);

void *__wrap_malloc(size_t bytes) {
    num_allocations++;
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes) {
    num_allocations++;
    return __real_calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes) {
    num_allocations++;
    return __real_realloc(memory, bytes);
}
#endif

/* ------------------------------------------------------------------ conversions */

/* Value of a small float format from its fields: the definition, in double. */
static double model_value(uint32_t bits, int exponent_bits, int mantissa_bits, int bias) {
    uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
    int exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    double value = exponent == 0
                       ? ldexp(mantissa, 1 - bias - mantissa_bits)
                       : ldexp(mantissa + (1u << mantissa_bits), exponent - bias - mantissa_bits);
    return bits >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}

static void test_e4m3(void) {
    int wrong = 0;
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint8_t bytes[4] = {(uint8_t)byte, 0, 0, 0};
        float scalar = kbmla_e4m3_to_float((uint8_t)byte), lane = widen_bytes(bytes)[0];
        if ((byte & 0x7F) == 0x7F)
            wrong += scalar == scalar || lane == lane;
        else
            wrong += (double)scalar != model_value(byte, 4, 3, 7) ||
                     kbmla_float_bits(scalar) != kbmla_float_bits(lane);
    }
    CHECK(wrong == 0, "%d of 256 bytes", wrong);

    /* Rounding: each border between neighbours, a tie, and one step to either side of it. */
    for (int byte = 0; byte < 0x7E; byte++) {
        float low = kbmla_e4m3_to_float((uint8_t)byte);
        float high = kbmla_e4m3_to_float((uint8_t)(byte + 1)), border = 0.5f * (low + high);
        float even = byte % 2 == 0 ? low : high;
        wrong += kbmla_round_e4m3(low) != low;
        wrong += kbmla_round_e4m3(border) != even;
        wrong += kbmla_round_e4m3(nextafterf(border, 0.0f)) != low;
        wrong += kbmla_round_e4m3(nextafterf(border, 1e9f)) != high;
    }
    CHECK(wrong == 0, "%d borders", wrong);
    CHECK(kbmla_round_e4m3(1e30f) == 448.0f && kbmla_round_e4m3(INFINITY) == 448.0f, "saturation");
    CHECK(isnan(kbmla_round_e4m3(NAN)), "NaN");

    for (uint32_t i = 0; i < 1u << 21; i++) {
        /* All positive patterns up to infinity, 1021 apart. */
        float x = kbmla_bits_float((uint32_t)kbmla_min((int32_t)(i * 1021u), 0x7F800000));
        wrong += kbmla_round_e4m3(x) != round_e4m3_lanes(splat(x))[0];
    }
    CHECK(wrong == 0, "%d lanes", wrong);
    CHECK(isnan(round_e4m3_lanes(splat(NAN))[0]), "NaN");
    CHECK(isnan(round_e4m3_lanes(splat(kbmla_bits_float(0xFFFFFFFFu)))[0]), "NaN");
}

static void test_bf16(void) {
    int wrong = 0;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        float value = kbmla_bf16_to_float((uint16_t)bits);
        if ((bits & 0x7FFF) > 0x7F80) {
            wrong += value == value || !isnan(kbmla_bf16_to_float(kbmla_float_to_bf16(value)));
            continue;
        }
        wrong += (bits & 0x7FFF) != 0x7F80 && (double)value != model_value(bits, 8, 7, 127);
        wrong += kbmla_float_to_bf16(value) != bits;
        if ((bits & 0x7FFF) == 0x7F80)
            continue;
        /* Halfway to the next magnitude: to even, infinity included. */
        uint32_t half = bits << 16 | 0x8000u;
        wrong += kbmla_float_to_bf16(kbmla_bits_float(half)) != bits + (bits & 1);
        wrong += kbmla_float_to_bf16(kbmla_bits_float(half - 1)) != bits;
        wrong += kbmla_float_to_bf16(kbmla_bits_float(half + 1)) != bits + 1;
    }
    CHECK(wrong == 0, "%d values", wrong);
}

static void test_fp16(void) {
    int wrong = 0;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        float value = kbmla_fp16_to_float((uint16_t)bits);
        if ((bits & 0x7FFF) > 0x7C00) {
            wrong += value == value || !isnan(kbmla_fp16_to_float(kbmla_float_to_fp16(value)));
            continue;
        }
        wrong += kbmla_float_to_fp16(value) != bits;
        if ((bits & 0x7FFF) == 0x7C00) {
            wrong += !isinf(value);
            continue;
        }
        /* 0x7C00 read as a number is 2^16, so the last border is that of infinity. */
        double model = model_value(bits, 5, 10, 15);
        float border = (float)(0.5 * (model + model_value(bits + 1, 5, 10, 15)));
        float outward = border < 0.0f || bits == 0x8000 ? -INFINITY : INFINITY;
        wrong += (double)value != model;
        wrong += kbmla_float_to_fp16(border) != bits + (bits & 1);
        wrong += kbmla_float_to_fp16(nextafterf(border, -outward)) != bits;
        wrong += kbmla_float_to_fp16(nextafterf(border, outward)) != bits + 1;
    }
    CHECK(wrong == 0, "%d values", wrong);
}

static void test_exp2(void) {
    int wrong = 0;
    double worst = 0.0;
    for (int n = -126; n <= 127; n++)
        wrong += exp2_lanes(splat((float)n))[0] != ldexpf(1.0f, n);
    CHECK(wrong == 0, "%d integers", wrong);
    for (int i = 0; i <= 2000000; i++) {
        float x = -125.99f + (float)i * (134.0f / 2000000.0f);
        double exact = exp2((double)x);
        double ulp = ldexp(1.0, ilogb(exact) - 23);
        worst = fmax(worst, fabs((double)exp2_lanes(splat(x))[0] - exact) / ulp);
    }
    CHECK(worst < 1.5, "%g ulp", worst);
    CHECK(exp2_lanes(splat(-INFINITY))[0] == 0.0f, "-inf");
    CHECK(exp2_lanes(splat(-1e7f))[0] == 0.0f, "far below");
    CHECK(isnan(exp2_lanes(splat(NAN))[0]), "NaN");
}

/* ------------------------------------------------------------------ rules and sizes */

static void test_split_bounds(void) {
    int wrong = 0;
    for (int32_t tiles = 0; tiles <= 300; tiles++) {
        for (int32_t count = -1; count <= 300; count++) {
            int32_t n = kbmla_normalise_count(tiles, count), next = 0;
            wrong += n < 1 || n > 256 || n > kbmla_max(count, 1);
            wrong += kbmla_normalise_count(tiles, n) != n;
            for (int32_t split = 0; split < n; split++) {
                kbmla_split_range range = kbmla_split_bounds(tiles, count, split);
                kbmla_split_range same = kbmla_split_bounds(tiles, n, split);
                wrong += range.begin_tile != next || range.count != n;
                wrong += range.end_tile <= range.begin_tile && tiles > 0;
                wrong += same.begin_tile != range.begin_tile || same.end_tile != range.end_tile;
                next = range.end_tile;
            }
            kbmla_split_range past = kbmla_split_bounds(tiles, count, n);
            wrong += next != tiles || past.begin_tile != past.end_tile;
        }
    }
    CHECK(wrong == 0, "%d splits", wrong);
    CHECK(kbmla_num_tiles(INT32_MAX) == 1 << 24 && kbmla_num_tiles(INT32_MIN) == 0, "limits");
}

static void test_entries(void) {
    int wrong = 0;
    for (int i = 0; i < 10000; i++) {
        int32_t requests = 1 + random_below(1024), batch = random_below(requests);
        int32_t q_tile = random_below(8), split = random_below(256);
        int32_t entry = kbmla_pack_entry(q_tile, batch, split, requests);
        kbmla_work_tile tile = kbmla_unpack_entry(entry, requests);
        wrong +=
            !tile.is_valid || tile.q_tile != q_tile || tile.batch != batch || tile.split != split;
    }
    CHECK(wrong == 0, "%d entries", wrong);
    CHECK(!kbmla_unpack_entry(-1, 3).is_valid && !kbmla_unpack_entry(INT32_MIN, 3).is_valid,
          "negative entries");
}

static void test_masks(void) {
    int wrong = 0;
    for (int32_t world = 1; world <= 5; world++)
        for (int32_t rank = 0; rank < world; rank++)
            for (int32_t interleave = 1; interleave <= 7; interleave++) {
                kbmla_context_parallel cp = {world, rank, interleave};
                int32_t local = 0;
                for (int32_t global = 0; global < 200; global++) {
                    wrong += kbmla_local_length(global, cp) != local;
                    for (int32_t token = 0; token < 3; token++) {
                        /* Of the keys of 200 tokens, those before global - 2 + token. */
                        int32_t bound = kbmla_max(global - 2 + token, 0);
                        int32_t seen = kbmla_min(kbmla_local_length(bound, cp), local);
                        wrong += kbmla_visible_keys(local, global, 3, token, 1, cp) != seen;
                        wrong += kbmla_visible_keys(local, global, 3, token, 0, cp) != local;
                    }
                    local += global / interleave % world == rank;
                }
            }
    CHECK(wrong == 0, "%d lengths", wrong);
    kbmla_context_parallel wide = {INT32_MAX, INT32_MAX - 1, INT32_MAX};
    CHECK(kbmla_local_length(INT32_MAX, wide) == 0, "a wide period");
    CHECK(kbmla_visible_keys(-5, -5, 1, 0, 1, (kbmla_context_parallel){1, 0, 1}) == 0, "none");
}

static void test_sizes(void) {
    const int32_t heads[] = {1, 8, 12, 16, 64, 96, 128}, q_lens[] = {1, 2, 3, 4, 7, 8};
    kbmla_error err;
    kbmla_sizes sizes;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        for (size_t j = 0; j < sizeof q_lens / sizeof *q_lens; j++) {
            kbmla_config config = KBMLA_CONFIG_INIT;
            config.num_heads = heads[i];
            config.q_len = q_lens[j];
            config.max_requests = 5;
            config.num_clusters = 7;
            config.capacity = 20;
            int32_t rows = heads[i] * q_lens[j];
            kbmla_status status = kbmla_config_sizes(&config, &sizes, &err);
            CHECK(status == KBMLA_OK, "%d x %d", heads[i], q_lens[j]);
            CHECK(sizes.rows == rows && sizes.q_tile_rows % 8 == 0 && sizes.q_tile_rows <= 128 &&
                      sizes.num_q_tiles * sizes.q_tile_rows >= rows &&
                      (sizes.num_q_tiles - 1) * sizes.q_tile_rows < rows,
                  "%d rows: %d tiles of %d", rows, sizes.num_q_tiles, sizes.q_tile_rows);
            CHECK(sizes.list_len >= 5 * sizes.num_q_tiles + 7 + 5, "%d rows", rows);
            int64_t slot_rows = (int64_t)sizes.max_partials * sizes.q_tile_rows;
            CHECK(sizes.partial_lse_offset >= slot_rows * KBMLA_HEAD_DIM_V * 4 &&
                      sizes.workspace_bytes >= sizes.partial_lse_offset + slot_rows * 4,
                  "%d rows", rows);
        }
    kbmla_config config = KBMLA_CONFIG_INIT;
    CHECK(kbmla_config_sizes(&config, &sizes, &err) == KBMLA_INVALID_ARGUMENT, "no fields set");
    config.num_heads = 129;
    CHECK(kbmla_config_sizes(&config, &sizes, NULL) == KBMLA_UNSUPPORTED, "129 heads");
}

/* ------------------------------------------------------------------ decode: results */

static const shape shapes[] = {
    {.name = "one tile",
     .heads = 12,
     .q_len = 1,
     .page_size = 64,
     .num_requests = 1,
     .lengths = {77},
     .counts = {1}},
    {.name = "mixed",
     .heads = 16,
     .q_len = 1,
     .page_size = 64,
     .num_requests = 6,
     .lengths = {1, 0, 700, 128, 513, -3},
     .counts = {1, 1, 3, 1, 5, 1}},
    {.name = "causal over q tiles",
     .heads = 48,
     .q_len = 3,
     .page_size = 16,
     .num_requests = 3,
     .lengths = {258, 2, 128},
     .counts = {3, 1, 2}},
    {.name = "384 rows",
     .heads = 128,
     .q_len = 3,
     .page_size = 128,
     .num_requests = 1,
     .lengths = {385},
     .counts = {4}},
    {.name = "no causal mask",
     .heads = 5,
     .q_len = 4,
     .page_size = 2,
     .num_requests = 2,
     .lengths = {140, 3},
     .counts = {2, 1},
     .no_causal = 1},
    {.name = "page size 1",
     .heads = 7,
     .q_len = 2,
     .page_size = 1,
     .num_requests = 2,
     .lengths = {200, 129},
     .counts = {2, 2}},
    {.name = "page size 256",
     .heads = 3,
     .q_len = 5,
     .page_size = 256,
     .num_requests = 2,
     .lengths = {600, 255},
     .counts = {5, 1}},
    {.name = "DCP rank 0",
     .heads = 9,
     .q_len = 3,
     .page_size = 32,
     .num_requests = 4,
     .lengths = {900, 1, 2, 400},
     .counts = {3, 1, 1, 2},
     .world = 2,
     .rank = 0,
     .interleave = 1},
    {.name = "DCP rank 2",
     .heads = 9,
     .q_len = 6,
     .page_size = 32,
     .num_requests = 4,
     .lengths = {1500, 16, 18, 800},
     .counts = {3, 1, 1, 2},
     .world = 3,
     .rank = 2,
     .interleave = 8},
    {.name = "rescales",
     .heads = 10,
     .q_len = 1,
     .page_size = 64,
     .num_requests = 2,
     .lengths = {900, 640},
     .counts = {1, 2},
     .growth = 40.0},
    {.name = "p_scale 16",
     .heads = 10,
     .q_len = 1,
     .page_size = 64,
     .num_requests = 2,
     .lengths = {900, 640},
     .counts = {1, 2},
     .p_scale = 16.0f,
     .growth = 6.0},
    {.name = "p_scale 256",
     .heads = 10,
     .q_len = 1,
     .page_size = 64,
     .num_requests = 2,
     .lengths = {900, 640},
     .counts = {1, 2},
     .p_scale = 256.0f,
     .growth = 0.1},
    {.name = "FP16 partials",
     .heads = 13,
     .q_len = 2,
     .page_size = 64,
     .num_requests = 2,
     .lengths = {500, 900},
     .counts = {2, 8},
     .partial_fp16 = 1},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

/* Every element of a row written, and none between the rows. */
static void check_written(const decode_case *c) {
    int64_t poison = 0;
    for (size_t i = 0; i < c->out_len; i++)
        poison += c->out[i] == OUT_POISON;
    int64_t written = (int64_t)c->shape->num_requests * c->sizes.rows * KBMLA_HEAD_DIM_V;
    CHECK(poison == (int64_t)c->out_len - written, "%s: out", c->shape->name);
    poison = 0;
    for (size_t i = 0; i < c->lse_len; i++)
        poison += c->lse[i] == -12345.0f;
    written = (int64_t)c->shape->num_requests * c->sizes.rows;
    CHECK(poison == (int64_t)c->lse_len - written, "%s: lse", c->shape->name);
}

static void check_rows(const decode_case *c) {
    for (int batch = 0; batch < c->shape->num_requests; batch++) {
        int step = c->sizes.rows > 40 ? 17 : 1; /* the double references are slow */
        double squares = 0.0, num_rows = 0.0;
        for (int row = 0; row < c->sizes.rows; row += step) {
            row_result model, exact;
            reference_model(c, batch, row, &model);
            reference_exact(c, batch, row, &exact);
            double lse = (double)*case_lse(c, batch, row);
            double error = row_error(c, batch, row, &model);
            if (count_visible(c, batch, row) == 0) {
                CHECK(error == 0.0 && lse == -INFINITY, "%s: request %d row %d", c->shape->name,
                      batch, row);
                continue;
            }
            CHECK(error < 3e-3 && fabs(lse - model.lse) < 1e-4,
                  "%s: request %d row %d: error %g, lse %g for %g", c->shape->name, batch, row,
                  error, lse, model.lse);
            CHECK(fabs(lse - exact.lse) < 2e-3, "%s: request %d row %d: lse %g for %g",
                  c->shape->name, batch, row, lse, exact.lse);
            error = row_error(c, batch, row, &exact);
            squares += error * error;
            num_rows++;
        }
        /* The promised 0.02 is for contexts long enough to average P's rounding, 2.7% rms each;
         * growing keys concentrate P on few of them. */
        CHECK(c->shape->growth > 0.0 || squares <= 0.03 * 0.03 * num_rows,
              "%s: request %d: exact error %g", c->shape->name, batch, sqrt(squares / num_rows));
    }
}

/* The same bits again, into poisoned buffers, in whatever way `c` has been changed meanwhile. */
static void check_same_bits(const decode_case *c, const char *what) {
    uint16_t *out = allocate(c->out_len * sizeof *out);
    float *lse = allocate(c->lse_len * sizeof *lse);
    memcpy(out, c->out, c->out_len * sizeof *out);
    memcpy(lse, c->lse, c->lse_len * sizeof *lse);
    case_poison(c);
    case_run(c);
    CHECK(memcmp(out, c->out, c->out_len * sizeof *out) == 0, "%s: %s", c->shape->name, what);
    CHECK(memcmp(lse, c->lse, c->lse_len * sizeof *lse) == 0, "%s: %s", c->shape->name, what);
    free(out);
    free(lse);
}

static void test_shapes(void) {
    random_state = 1; /* the same cases on every instruction set */
    for (int i = 0; i < NUM_SHAPES; i++) {
        decode_case c;
        case_make(&c, &shapes[i]);
        case_run(&c);
        check_written(&c);
        check_rows(&c);
        check_same_bits(&c, "twice");
        size_t stack = 1 << 20;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        stack *= 4; /* red zones, and the sanitizer's own frames */
#endif
        c.args.parallel_for = threads_parallel_for;
        c.args.parallel_pool = &stack;
        check_same_bits(&c, "threads");
        c.args.parallel_for = NULL;
        case_plan(&c); /* the same entries in another order */
        check_same_bits(&c, "another order");
        case_free(&c);
    }
}

static void test_no_allocation(void) {
#ifdef KBMLA_COUNT_ALLOCATIONS
    decode_case c;
    case_make(&c, &shapes[1]);
    case_run(&c);
    int before = num_allocations;
    case_run(&c);
    CHECK(num_allocations == before, "%d allocations", num_allocations - before);
    case_free(&c);
#endif
}

#include "decode_edges.h"

int main(int argc, char **argv) {
    static const char *const isas[] = {"avx512", "avx2", "generic"};
    test_e4m3();
    test_bf16();
    test_fp16();
    test_exp2();
    test_split_bounds();
    test_entries();
    test_masks();
    test_sizes();
    CHECK(kbmla_cpu_select_isa("none such") == KBMLA_UNSUPPORTED, "unknown instruction set");
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        if (argc > 1 && strcmp(argv[1], isas[i]) != 0)
            continue;
        if (kbmla_cpu_select_isa(isas[i]) != KBMLA_OK) {
            printf("%s: not on this machine\n", isas[i]);
            continue;
        }
        CHECK(strcmp(kbmla_cpu_isa(), isas[i]) == 0, "%s", isas[i]);
        int failed = num_failed;
        test_shapes();
        test_no_allocation();
        test_edges();
        printf("%s: %s\n", isas[i], num_failed == failed ? "ok" : "FAILED");
    }
    kbmla_cpu_select_isa(NULL);
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0;
}
