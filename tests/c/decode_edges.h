/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode tests beyond plain results: probe inputs with exact answers, NaN, pages that do not
 * exist, plans that belong to something else, offsets past 4 GiB, and the public verbs. Part of
 * test_core.c.
 */
#ifndef KBMLA_TEST_DECODE_EDGES_H
#define KBMLA_TEST_DECODE_EDGES_H

#include "decode_case.h"

static const shape two_requests = {.name = "two requests",
                                   .heads = 8,
                                   .q_len = 2,
                                   .page_size = 64,
                                   .num_requests = 2,
                                   .lengths = {500, 700},
                                   .counts = {1, 3}};

/* Equal scores of any size give P = 1 exactly: out is the mean, lse the log of the count. */
static void test_uniform(uint8_t query_byte, uint8_t key_byte) {
    decode_case c;
    case_make(&c, &two_requests);
    for (int b = 0; b < 2; b++) {
        for (int row = 0; row < c.sizes.rows; row++)
            for (int d = 0; d < KBMLA_HEAD_DIM_QK; d++)
                c.query[case_query(&c, b, row) - c.query + d] = query_byte;
        for (int key = 0; key < c.lengths[b] && query_byte != 0; key++)
            memset(case_key(&c, b, key), key_byte, KBMLA_HEAD_DIM_QK);
    }
    case_run(&c);
    for (int b = 0; b < 2; b++) {
        for (int row = 0; row < c.sizes.rows; row++) {
            row_result exact;
            reference_exact(&c, b, row, &exact);
            int wrong = 0;
            for (int d = 0; d < KBMLA_HEAD_DIM_V; d++) {
                double out = (double)kbmla_bf16_to_float(case_out(&c, b, row)[d]);
                wrong += fabs(out - exact.out[d]) > 0x1.01p-8 * fabs(exact.out[d]) + 1e-6;
            }
            double lse = (double)*case_lse(&c, b, row);
            CHECK(wrong == 0, "bytes %x %x: request %d row %d: %d columns", query_byte, key_byte, b,
                  row, wrong);
            CHECK(fabs(lse - exact.lse) < 1e-4 + 0x1p-23 * fabs(exact.lse),
                  "bytes %x %x: request %d row %d: lse %g for %g", query_byte, key_byte, b, row,
                  lse, exact.lse);
        }
    }
    case_free(&c);
}

/* An attention sink: 499 keys at 2^-10.3 of a strong one, a quarter of the result between them.
 * With a p_scale of 1 they round to zero; a large one keeps them. */
static void test_sink(void) {
    double error[2];
    for (int i = 0; i < 2; i++) {
        decode_case c;
        shape sink = two_requests;
        sink.p_scale = i == 0 ? 1.0f : 256.0f;
        case_make(&c, &sink);
        c.args.softmax_scale /= 4.0;
        for (int row = 0; row < c.sizes.rows; row++)
            memset(c.query + (case_query(&c, 0, row) - c.query), 0x38, KBMLA_HEAD_DIM_QK);
        for (int key = 0; key < c.lengths[0]; key++)
            for (int d = 0; d < KBMLA_HEAD_DIM_QK; d++)
                case_key(&c, 0, key)[d] = key == 0 ? 0x38 : d % 2 ? 0x30 : 0x20;
        case_run(&c);
        row_result model, exact;
        reference_model(&c, 0, 15, &model);
        reference_exact(&c, 0, 15, &exact);
        CHECK(row_error(&c, 0, 15, &model) < 3e-3, "p_scale %g", (double)sink.p_scale);
        error[i] = row_error(&c, 0, 15, &exact);
        case_free(&c);
    }
    CHECK(error[0] > 0.1 && error[1] < 0.03, "errors %g and %g", error[0], error[1]);
}

/*
 * The maximum grows by exactly the allowance and is left alone, or by the next E4M3 step and is
 * taken. A weak key of the same tile tells: its p is the least that E4M3 keeps under the old
 * maximum, and nothing under a larger one. Scores are read off two rope columns, base 2.
 */
static void test_allowance(int32_t p_scale_log2, uint8_t strong, uint8_t weak, int is_kept) {
    shape one_row = {.name = "allowance",
                     .heads = 1,
                     .q_len = 1,
                     .page_size = 64,
                     .num_requests = 1,
                     .lengths = {256},
                     .counts = {1}};
    one_row.p_scale = ldexpf(1.0f, p_scale_log2);
    decode_case c;
    case_make(&c, &one_row);
    c.args.softmax_scale = 0.6931471805599453; /* ln 2 */
    memset(c.query, 0, KBMLA_HEAD_DIM_QK);
    memset(c.query + 574, 0x38, 2);
    for (int key = 0; key < 256; key++)
        memset(case_key(&c, 0, key), 0, KBMLA_HEAD_DIM_QK);
    case_key(&c, 0, 200)[575] = strong;
    memset(case_key(&c, 0, 201) + 574, weak, 2);
    case_key(&c, 0, 201)[0] = 0x7E;
    case_run(&c);
    CHECK((c.out[0] != 0) == is_kept, "p_scale 2^%d, strong %x", p_scale_log2, strong);
    case_free(&c);
}

static int is_nan_row(const decode_case *c, int batch, int row) {
    int count = isnan(*case_lse(c, batch, row)) != 0;
    for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
        count += isnan(kbmla_bf16_to_float(case_out(c, batch, row)[d])) != 0;
    return count == KBMLA_HEAD_DIM_V + 1;
}

/* A NaN in a valid key, or a page id the cache does not have, makes its request NaN and changes
 * no bit of another. */
static void test_nan(void) {
    for (int kind = 0; kind < 5; kind++) {
        decode_case c;
        case_make(&c, &two_requests);
        case_run(&c);
        size_t bytes = (size_t)c.args.out_batch_stride * sizeof(uint16_t);
        uint16_t *before = allocate(bytes);
        memcpy(before, c.out, bytes);
        int32_t *page = &c.block_table[c.args.block_table_stride + 5];
        if (kind == 0)
            case_key(&c, 1, 300)[17] = 0x7F;
        else if (kind == 1)
            memset(case_key(&c, 1, 256), 0xFF, KBMLA_HEAD_DIM_QK);
        else
            *page = kind == 2 ? -1 : kind == 3 ? (int32_t)c.args.num_pages : INT32_MIN;
        case_poison(&c);
        case_run(&c);
        CHECK(memcmp(before, c.out, bytes) == 0, "kind %d: the other request", kind);
        for (int row = 0; row < c.sizes.rows; row++)
            CHECK(is_nan_row(&c, 1, row), "kind %d: row %d", kind, row);
        free(before);
        case_free(&c);
    }
}

/* NaN in the query reaches its own row alone. */
static void test_nan_query(void) {
    decode_case c;
    case_make(&c, &two_requests);
    c.query[case_query(&c, 1, 3) - c.query + 575] = 0xFF;
    case_run(&c);
    for (int b = 0; b < 2; b++)
        for (int row = 0; row < c.sizes.rows; row++)
            CHECK(is_nan_row(&c, b, row) == (b == 1 && row == 3), "request %d row %d", b, row);
    case_free(&c);
}

/* Requests of no length, or a cache without pages: zeros, and no read through null pointers. */
static void test_empty(void) {
    decode_case c;
    case_make(&c, &two_requests);
    c.lengths[0] = -1;
    c.lengths[1] = 0;
    c.args.cache = NULL;
    c.args.block_table = NULL;
    c.args.num_pages = 0;
    case_plan(&c);
    case_run(&c);
    check_written(&c);
    for (int b = 0; b < 2; b++)
        for (int row = 0; row < c.sizes.rows; row++) {
            row_result zero = {.lse = 0.0};
            CHECK(row_error(&c, b, row, &zero) == 0.0 && *case_lse(&c, b, row) == -INFINITY,
                  "request %d row %d", b, row);
        }
    c.lengths[0] = 100;
    case_run(&c);
    CHECK(is_nan_row(&c, 0, 0), "pages that the cache does not have");
    c.args.max_pages = 0;
    case_run(&c);
    CHECK(*case_lse(&c, 0, 0) == -INFINITY, "a table without columns");
    c.args.num_requests = 0;
    case_run(&c);
    case_free(&c);
}

/* Plans, tables and lengths of random integers: no hang and no step outside the buffers. The gaps
 * between rows are looked at here, the ends of the buffers by the address sanitizer. */
static void test_garbage(void) {
    static const shape small = {.name = "garbage",
                                .heads = 40,
                                .q_len = 4,
                                .page_size = 4,
                                .num_requests = 3,
                                .lengths = {300, 40, 150},
                                .counts = {2, 1, 2}};
    for (int round = 0; round < 40; round++) {
        decode_case c;
        case_make(&c, &small);
        int num_garbage = 0;
        for (int32_t i = 0; i < c.sizes.list_len; i++) {
            /* Entries that are small enough to mean something, wild ones, and a garbage tail. */
            if (round % 4 == 0 && i < c.sizes.list_len - MAX_BATCH)
                continue;
            int32_t wild = (int32_t)random_bits();
            int32_t close = random_below(3 << 11) - 100;
            c.work[i] = round % 2 ? wild : num_garbage < 30 ? close : -1;
            num_garbage++;
        }
        for (int b = 0; b < 3; b++) {
            if (round % 3 == 0)
                c.counts[b] = (int32_t)random_bits() >> (round % 31);
            if (round % 5 == 0)
                c.lengths[b] = round % 2 ? random_below(700) : INT32_MAX - b;
        }
        for (size_t i = 0; i < c.table_len && round % 7 == 0; i++)
            c.block_table[i] = (int32_t)random_bits() >> (round % 31);
        case_run(&c);
        int wrong = 0;
        for (int b = 0; b < 3; b++)
            for (int row = 0; row < c.sizes.rows; row++)
                for (int i = 0; i < GAP; i++)
                    wrong += case_out(&c, b, row)[KBMLA_HEAD_DIM_V + i] != OUT_POISON;
        CHECK(wrong == 0, "round %d: %d elements between rows", round, wrong);
        case_free(&c);
    }
}

/* First slots and counts that would reach past the workspace, under valid entries. */
static void test_foreign_slots(void) {
    static const int32_t counts[] = {2, 3, 200, 256, 257, INT32_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (int32_t back = -1; back < 4; back++) {
            decode_case c;
            shape tall = two_requests;
            tall.heads = 100; /* two q tiles */
            case_make(&c, &tall);
            c.counts[1] = counts[i];
            int32_t base = back < 0 ? -1 : back == 0 ? INT32_MAX : c.sizes.max_partials - 2 * back;
            c.work[c.sizes.list_len - MAX_BATCH + 1] = ~base;
            case_run(&c);
            CHECK(!isnan(*case_lse(&c, 0, 199)), "count %d, base %d", counts[i], base);
            case_free(&c);
        }
    }
}

/* Partials put into the workspace by hand: weights 2^-2, 2^-5 and 1, skipped splits, NaN, an empty
 * row. */
static void test_reduce(void) {
    decode_case c;
    shape one = {.name = "reduce",
                 .heads = 4,
                 .q_len = 1,
                 .page_size = 64,
                 .num_requests = 1,
                 .lengths = {384},
                 .counts = {3}};
    case_make(&c, &one);
    const float lse[3][4] = {{1.0f, -INFINITY, -INFINITY, 0.0f},
                             {-2.0f, 3.0f, -INFINITY, NAN},
                             {3.0f, -INFINITY, -INFINITY, 0.0f}};
    float *partial_lse = c.workspace + c.sizes.partial_lse_offset / (int64_t)sizeof(float);
    for (int split = 0; split < 3; split++)
        for (int row = 0; row < 4; row++) {
            int at = split * c.sizes.q_tile_rows + row;
            partial_lse[at] = lse[split][row];
            for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
                c.workspace[at * KBMLA_HEAD_DIM_V + d] =
                    lse[split][row] == -INFINITY ? NAN : (float)(d * (split + 1));
        }
    kbmla_status status = kbmla_reduce(&c.config, &c.args, NULL, NULL);
    CHECK(status == KBMLA_OK, "status %d", status);
    int wrong = 0;
    for (int d = 0; d < KBMLA_HEAD_DIM_V; d++) {
        double mean = d * (0.25 * 1 + 0x1p-5 * 2 + 3) / (0.25 + 0x1p-5 + 1);
        double out = (double)kbmla_bf16_to_float(case_out(&c, 0, 0)[d]);
        wrong += fabs(out - 0.75 * mean) > 0x1.01p-8 * mean;
        wrong += case_out(&c, 0, 1)[d] != kbmla_float_to_bf16((float)(0.75 * d * 2));
        wrong += case_out(&c, 0, 2)[d] != 0;
    }
    CHECK(wrong == 0, "%d columns", wrong);
    CHECK(fabs((double)*case_lse(&c, 0, 0) - (3.0 + log2(1.28125))) < 1e-6, "row 0");
    CHECK(*case_lse(&c, 0, 1) == 3.0f && *case_lse(&c, 0, 2) == -INFINITY, "rows 1 and 2");
    CHECK(is_nan_row(&c, 0, 3), "row 3");
    case_free(&c);
}

/* A plan of other lengths of the same batch: results where every entry still fits. */
static void test_stale(void) {
    decode_case c;
    case_make(&c, &two_requests);
    c.lengths[1] = 300; /* 3 tiles: the count of 3 stays, each split shrinks */
    case_run(&c);
    check_written(&c);
    check_rows(&c);
    c.lengths[1] = 100; /* 1 tile: split 0 decodes it whole, the others are skipped */
    c.counts[1] = 1;
    case_poison(&c);
    case_run(&c);
    check_written(&c);
    check_rows(&c);
    case_free(&c);
}

/* Page offsets past 4 GiB, in a reservation of which only the touched pages exist. */
static void test_wide_offsets(void) {
    decode_case c;
    case_make(&c, &two_requests);
    case_run(&c);
    int64_t page_stride = (int64_t)6 << 30;
    page_stride /= c.args.num_pages;
    size_t bytes = (size_t)(page_stride * c.args.num_pages);
    uint8_t *wide = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (wide == MAP_FAILED) {
        printf("6 GiB cannot be reserved: wide offsets not tested\n");
        case_free(&c);
        return;
    }
    for (int64_t page = 0; page < c.args.num_pages; page++)
        memcpy(wide + page * page_stride, c.cache + page * c.args.cache_page_stride,
               (size_t)c.args.cache_page_stride);
    c.args.cache = wide;
    c.args.cache_page_stride = page_stride;
    check_same_bits(&c, "6 GiB apart");
    munmap(wide, bytes);
    case_free(&c);
}

/* lse may be left out. */
static void test_no_lse(void) {
    decode_case c;
    case_make(&c, &two_requests);
    case_run(&c);
    uint16_t *before = allocate(c.out_len * sizeof *before);
    memcpy(before, c.out, c.out_len * sizeof *before);
    c.args.lse = NULL;
    case_poison(&c);
    case_run(&c);
    CHECK(memcmp(before, c.out, c.out_len * sizeof *before) == 0, "out");
    CHECK(c.lse[0] == -12345.0f, "lse");
    free(before);
    case_free(&c);
}

/* The public verbs, with the planner's own plans. */
static void test_planned(void) {
    static const int32_t clusters[] = {1, 5, 40};
    for (int i = 0; i < 9; i++) {
        decode_case c;
        case_make(&c, &two_requests);
        c.config.policy = i % 3;
        c.config.num_clusters = clusters[i / 3];
        kbmla_error err = {.text = ""};
        CHECK(kbmla_config_sizes(&c.config, &c.sizes, &err) == KBMLA_OK, "%s", err.text);
        kbmla_plan_args plan = {
            c.lengths, c.args.num_requests, c.args.counts_len, c.args.work_len, c.counts, c.work};
        CHECK(kbmla_plan(&c.config, &plan, NULL, &err) == KBMLA_OK, "%s", err.text);
        CHECK(kbmla_decode(&c.config, &c.args, NULL, &err) == KBMLA_OK, "%s", err.text);
        check_written(&c);
        check_rows(&c);
        case_free(&c);
    }
}

static void test_edges(void) {
    test_uniform(0x00, 0x00);
    test_uniform(0x38, 0x40);
    test_uniform(0x7E, 0x7E); /* raw scores of 1.2e8 */
    test_uniform(0x7E, 0xF4); /* and of -5e7 */
    test_sink();
    test_allowance(0, 0x50, 0xC9, 1); /* 8, weak -4.5 twice */
    test_allowance(0, 0x51, 0xC9, 0); /* 9 */
    test_allowance(4, 0x48, 0xCD, 1); /* 4, weak -6.5 twice */
    test_allowance(4, 0x49, 0xCD, 0); /* 4.5 */
    test_nan();
    test_nan_query();
    test_empty();
    test_garbage();
    test_foreign_slots();
    test_reduce();
    test_stale();
    test_wide_offsets();
    test_no_lse();
    test_planned();
}

#endif
