/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kbmla: KV-balanced decode for multi-head latent attention (MLA), C interface.
 *
 * Three verbs. `kbmla_plan` cuts every request of a decode step into splits from its own KV
 * length, once per step; `kbmla_decode` walks that plan for one layer and merges the splits;
 * `kbmla_reduce` is that merge alone. All memory belongs to the caller: sizes come from
 * `kbmla_config_sizes`, nothing here allocates, synchronises, prints, exits or reads the
 * environment, and every function may be called from several threads on distinct buffers.
 *
 * The CPU backend ignores `stream`. Tensors are row-major; strides count elements, and the last
 * dimension of every tensor is contiguous.
 */
#ifndef KBMLA_H
#define KBMLA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------ constants of the problem */

#define KBMLA_HEAD_DIM_QK 576   /* latent + rope; the whole cache row is the key */
#define KBMLA_HEAD_DIM_V 512    /* latent; the first 512 bytes of the same row are the value */
#define KBMLA_TILE_TOKENS 128   /* KV tokens of one tile: split points are multiples of it */
#define KBMLA_MAX_TILE_ROWS 128 /* query rows (token * heads + head) of one q tile, at most */
#define KBMLA_MAX_HEADS 128
#define KBMLA_MAX_ROWS 1024     /* heads * q_len, at most */
#define KBMLA_MAX_PAGE_SIZE 256 /* tokens; every power of two from 1 up to it */
#define KBMLA_MAX_SPLITS 256    /* splits of one request: 8 bits of a work entry */
#define KBMLA_MAX_REQUESTS 1024
#define KBMLA_FIXED_SPLITS 8 /* splits of one request under KBMLA_POLICY_FIXED, at most */

/* ------------------------------------------------------------------ status */

typedef enum kbmla_status {
    KBMLA_OK = 0,
    KBMLA_INVALID_ARGUMENT = 1, /* a shape, stride, range or pointer; err names the argument */
    KBMLA_UNSUPPORTED = 2,      /* a head count or device this library does not run */
    KBMLA_BUFFER_TOO_SMALL = 3, /* counts, work or workspace shorter than the config needs */
    KBMLA_CUDA = 4,             /* a CUDA call failed; err->cuda_code holds its code */
    KBMLA_INTERNAL = 5
} kbmla_status;

/* Filled on failure, untouched on success. Owned by the caller; NULL is allowed. */
typedef struct kbmla_error {
    kbmla_status status;
    int32_t cuda_code;
    char text[192]; /* "argument: expected ..., got ..." */
} kbmla_error;

const char *kbmla_status_name(kbmla_status status);

/* ------------------------------------------------------------------ configuration */

typedef enum kbmla_policy {
    KBMLA_POLICY_BALANCED = 0, /* counts from all lengths of the step: shortest finishing time */
    KBMLA_POLICY_EQUAL = 1,    /* every request the same count (the stock rule), for comparison */
    /* A count from the request's own length only, so that results are batch invariant, at the price
     * of a list and a workspace that capacity does not bound. */
    KBMLA_POLICY_FIXED = 2
} kbmla_policy;

typedef enum kbmla_backend {
    KBMLA_BACKEND_CPU = 0,
    KBMLA_BACKEND_CUDA = 1, /* portable, SM80 and later */
    KBMLA_BACKEND_SM90 = 2  /* H100 and H200: FP8 tensor cores */
} kbmla_backend;

/* What one core runs. Fill with KBMLA_CONFIG_INIT, then set the first four fields. */
typedef struct kbmla_config {
    size_t struct_size;
    int32_t num_heads;        /* 1..128, of this rank */
    int32_t q_len;            /* query tokens per request, >= 1; num_heads * q_len <= 1024 */
    int32_t max_requests;     /* 1..1024 */
    int32_t num_clusters;     /* width of the wave that walks a plan: an input of the plan */
    int32_t capacity;         /* entries of a plan beyond one per (request, q tile), at most */
    int32_t min_split_tokens; /* the least number of tokens a split is worth */
    int32_t policy;           /* kbmla_policy */
    int32_t backend;          /* kbmla_backend */
    int32_t causal;           /* 1: query token t of q sees keys up to its own; 0: all keys */
    int32_t partial_fp16;     /* 1: unmerged outputs are stored as FP16, 0: as FP32 */
    int32_t reducer_d_tiles;  /* 1 or 2, without effect: the reduce shares columns by its rows */
    float p_scale;            /* power of two in 1..256, factor of P before its E4M3 rounding */
} kbmla_config;

#define KBMLA_CONFIG_INIT {sizeof(kbmla_config), 0, 0, 0, 0, 0, 256, 0, 0, 1, 0, 1, 1.0f}

/* Sizes that follow from a config alone. */
typedef struct kbmla_sizes {
    int32_t rows;         /* num_heads * q_len */
    int32_t num_q_tiles;  /* ceil(rows / 128) */
    int32_t q_tile_rows;  /* rows of a q tile: rows spread evenly, a multiple of 8 */
    int32_t max_extra;    /* entries beyond one per (request, q tile), capacity after limits */
    int32_t list_len;     /* int32 elements of work */
    int32_t max_partials; /* slots of the workspace, one per entry of a split request */
    int64_t partial_lse_offset; /* bytes from the start of the workspace */
    int64_t workspace_bytes;
} kbmla_sizes;

/* Checks a config. Pure; INVALID_ARGUMENT or UNSUPPORTED with the field's name on failure. */
kbmla_status kbmla_config_check(const kbmla_config *config, kbmla_error *err);

/* Checks a config and derives its sizes. Pure. */
kbmla_status kbmla_config_sizes(const kbmla_config *config, kbmla_sizes *sizes, kbmla_error *err);

/*
 * Readies the current CUDA device for a config: sets one-time attributes of its kernels and gives
 * the width of the wave that fills the device, for num_clusters. Call it once, before a graph's
 * capture. The config's own num_clusters is not read but must be valid. On the CPU there is nothing
 * to ready and the width is the caller's choice: *num_clusters becomes 1. NULL is allowed for it.
 */
kbmla_status kbmla_prepare(const kbmla_config *config, int32_t *num_clusters, kbmla_error *err);

/* ------------------------------------------------------------------ parallelism on the CPU */

/*
 * Runs body(begin, end, context) over disjoint ranges that cover [0, count), and returns when all
 * are done. `pool` is the caller's. A NULL function runs the whole range on the calling thread.
 * Each thread needs 1 MiB of stack. Results do not depend on how the range is cut.
 */
typedef void (*kbmla_parallel_body)(int64_t begin, int64_t end, void *context);
typedef void (*kbmla_parallel_for)(int64_t count, kbmla_parallel_body body, void *context,
                                   void *pool);

struct CUstream_st; /* cudaStream_t points to it */

/* ------------------------------------------------------------------ plan */

typedef struct kbmla_plan_args {
    const int32_t *lengths; /* [num_requests] KV tokens of this rank; <= 0 means none */
    int32_t num_requests;   /* 0..max_requests */
    int64_t counts_len;     /* elements of counts, >= num_requests */
    int64_t work_len;       /* elements of work, >= list_len */
    int32_t *counts;        /* out, [counts_len]: splits per request, 1..256 */
    int32_t *work;          /* out, [work_len]: the work list, see rules.h */
} kbmla_plan_args;

/* Plans one decode step. Deterministic in (config, lengths). */
kbmla_status kbmla_plan(const kbmla_config *config, const kbmla_plan_args *args,
                        struct CUstream_st *stream, kbmla_error *err);

/* ------------------------------------------------------------------ decode and reduce */

/* On a GPU the addresses of query, cache and out are multiples of 16 bytes, and so are the strides
 * of their dimensions above size 1. out and lse share no memory with each other or the inputs. */
typedef struct kbmla_decode_args {
    int32_t num_requests; /* B; the same as in the plan */
    const uint8_t *query; /* [B, q_len, heads, 576] e4m3 */
    int64_t query_batch_stride;
    int64_t query_token_stride;
    int64_t query_head_stride;
    const uint8_t *cache; /* [num_pages, page_size, 576] e4m3 */
    int64_t num_pages;
    int64_t page_size;
    int64_t cache_page_stride;
    int64_t cache_row_stride;
    const int32_t *block_table; /* [B, max_pages]; columns past a request's pages hold anything */
    int64_t max_pages;
    int64_t block_table_stride;
    const int32_t *lengths;     /* [B]; a length past max_pages * page_size counts as that */
    const int32_t *causal_lens; /* [B] global lengths under DCP; NULL when cp_world is 1 */
    int32_t cp_world;
    int32_t cp_rank;
    int32_t cp_interleave;
    double softmax_scale;  /* of the raw scores; finite, > 0 */
    double output_scale;   /* of the output; finite, > 0 */
    const int32_t *counts; /* [counts_len] from the plan */
    const int32_t *work;   /* [work_len] from the plan */
    int64_t counts_len;
    int64_t work_len;
    void *workspace; /* workspace_bytes, 16-byte aligned, any content */
    int64_t workspace_bytes;
    uint16_t *out; /* [B, q_len, heads, 512] bf16, every element written */
    int64_t out_batch_stride;
    int64_t out_token_stride;
    int64_t out_head_stride;
    float *lse; /* [B, q_len, heads] log2 of the sum of exponentials, or NULL */
    int64_t lse_batch_stride;
    int64_t lse_token_stride;
    int64_t lse_head_stride;
    /* CUDA, decode only: 1 chains its kernels by programmatic dependent launch, as plan always does
     * on SM90 and later. They read lengths, counts and work before the kernel in front has ended,
     * whatever these hold at that time, and again when it has: the three are memory of the device
     * from the launch on. A kernel of the stream that is launched this way itself must execute
     * griddepcontrol.wait. */
    int32_t pdl;
    kbmla_parallel_for parallel_for; /* CPU: NULL is serial */
    void *parallel_pool;
} kbmla_decode_args;

/*
 * Decodes one layer with the current plan: out and lse of every row, split requests merged.
 * A row that sees no key gets out = 0 and lse = -inf. On any error nothing is written.
 */
kbmla_status kbmla_decode(const kbmla_config *config, const kbmla_decode_args *args,
                          struct CUstream_st *stream, kbmla_error *err);

/* The merge alone, of partials already in the workspace. query and cache are not read. */
kbmla_status kbmla_reduce(const kbmla_config *config, const kbmla_decode_args *args,
                          struct CUstream_st *stream, kbmla_error *err);

/* Name of the instruction set the CPU backend runs on here: "avx512", "avx2" or "generic". */
const char *kbmla_cpu_isa(void);

/* How this library was built: "compiler=...; cuda kernels=...", none for a CPU-only build. */
const char *kbmla_built_with(void);

#ifdef __cplusplus
}
#endif

#endif
