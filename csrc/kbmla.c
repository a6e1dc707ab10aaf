/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Argument validation, choice of the backend and error texts. The only caller of the backend
 * tables: behind it every size, stride and range is known to be good. Tensors' types and devices
 * are the caller's to check, since a pointer does not tell.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "internal.h"

const char *kbmla_status_name(kbmla_status status) {
    switch (status) {
    case KBMLA_OK:
        return "OK";
    case KBMLA_INVALID_ARGUMENT:
        return "INVALID_ARGUMENT";
    case KBMLA_UNSUPPORTED:
        return "UNSUPPORTED";
    case KBMLA_BUFFER_TOO_SMALL:
        return "BUFFER_TOO_SMALL";
    case KBMLA_CUDA:
        return "CUDA";
    case KBMLA_INTERNAL:
        return "INTERNAL";
    }
    return "UNKNOWN";
}

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "gcc " __VERSION__
#else
#define COMPILER "unknown"
#endif

#if defined(KBMLA_HAS_CUDA)
#define CUDA_KERNELS "yes"
#else
#define CUDA_KERNELS "none"
#endif

const char *kbmla_built_with(void) {
    return "compiler=" COMPILER "; cuda kernels=" CUDA_KERNELS;
}

kbmla_status kbmla_fail(kbmla_error *err, kbmla_status status, const char *format, ...) {
    if (err != NULL) {
        va_list arguments;
        va_start(arguments, format);
        err->status = status;
        err->cuda_code = 0;
        vsnprintf(err->text, sizeof err->text, format, arguments);
        va_end(arguments);
    }
    return status;
}

static const struct kbmla_backend_table cpu_backend = {kbmla_cpu_plan, kbmla_cpu_decode,
                                                       kbmla_cpu_reduce};

#if defined(KBMLA_HAS_CUDA)
static const struct kbmla_backend_table cuda_backend = {kbmla_cuda_plan, kbmla_cuda_decode,
                                                        kbmla_cuda_reduce};
static const struct kbmla_backend_table sm90_backend = {kbmla_cuda_plan, kbmla_sm90_decode,
                                                        kbmla_cuda_reduce};
#endif

static const struct kbmla_backend_table *backend_of(const kbmla_config *config) {
    switch (config->backend) {
    case KBMLA_BACKEND_CPU:
        return &cpu_backend;
#if defined(KBMLA_HAS_CUDA)
    case KBMLA_BACKEND_CUDA:
        return &cuda_backend;
    case KBMLA_BACKEND_SM90:
        return &sm90_backend;
#endif
    default:
        return NULL;
    }
}

/* ------------------------------------------------------------------ checks shared by the verbs */

static kbmla_status check_pointer(kbmla_error *err, const char *name, const void *pointer) {
    RETURN_IF(pointer == NULL, err, KBMLA_INVALID_ARGUMENT, "%s: expected data, got NULL", name);
    return KBMLA_OK;
}

static kbmla_status check_requests(kbmla_error *err, int32_t num_requests, int32_t most) {
    RETURN_IF(num_requests < 0 || num_requests > most, err, KBMLA_INVALID_ARGUMENT,
              "requests: expected at most %d, as prepared, got %d", most, num_requests);
    return KBMLA_OK;
}

static kbmla_status check_plan_buffers(kbmla_error *err, const kbmla_sizes *sizes,
                                       int32_t num_requests, int64_t counts_len, int64_t work_len) {
    RETURN_IF(counts_len < num_requests, err, KBMLA_BUFFER_TOO_SMALL,
              "counts: expected at least %d elements, got %lld", num_requests,
              (long long)counts_len);
    RETURN_IF(work_len < sizes->list_len, err, KBMLA_BUFFER_TOO_SMALL,
              "work: expected at least %d elements (list_len), got %lld", sizes->list_len,
              (long long)work_len);
    return KBMLA_OK;
}

static kbmla_status check_stride(kbmla_error *err, const char *name, int64_t stride) {
    RETURN_IF(stride < 0, err, KBMLA_INVALID_ARGUMENT, "%s: expected strides >= 0, got %lld", name,
              (long long)stride);
    return KBMLA_OK;
}

/* Whether no two elements of a written tensor [B, q, heads, inner] share memory, by the usual
 * sufficient rule: taken from the smallest stride up, each steps over all below it. */
static int is_non_overlapping(const int64_t size[3], const int64_t stride[3], int64_t inner) {
    int done[3] = {size[0] <= 1, size[1] <= 1, size[2] <= 1};
    int64_t extent = inner;
    for (;;) {
        int next = -1;
        for (int i = 0; i < 3; i++)
            if (!done[i] && (next < 0 || stride[i] < stride[next]))
                next = i;
        if (next < 0)
            return 1;
        if (stride[next] < extent)
            return 0;
        extent += (size[next] - 1) * stride[next];
        done[next] = 1;
    }
}

/* Elements from the first to past the last. */
static uintptr_t extent_of(const int64_t size[3], const int64_t stride[3], int64_t inner) {
    int64_t extent = inner;
    for (int i = 0; i < 3; i++)
        extent += (size[i] - 1) * stride[i];
    return (uintptr_t)extent;
}

static kbmla_status check_written(kbmla_error *err, const kbmla_config *config,
                                  const kbmla_decode_args *args) {
    const int64_t size[3] = {args->num_requests, config->q_len, config->num_heads};
    const int64_t out[3] = {args->out_batch_stride, args->out_token_stride, args->out_head_stride};
    const int64_t lse[3] = {args->lse_batch_stride, args->lse_token_stride, args->lse_head_stride};
    FORWARD_IF_ERROR(check_pointer(err, "out", args->out));
    RETURN_IF(!is_non_overlapping(size, out, KBMLA_HEAD_DIM_V), err, KBMLA_INVALID_ARGUMENT,
              "out: expected strides without overlap, got (%lld, %lld, %lld, 1)", (long long)out[0],
              (long long)out[1], (long long)out[2]);
    RETURN_IF(args->lse != NULL && !is_non_overlapping(size, lse, 1), err, KBMLA_INVALID_ARGUMENT,
              "lse: expected strides without overlap, got (%lld, %lld, %lld)", (long long)lse[0],
              (long long)lse[1], (long long)lse[2]);
    if (args->lse != NULL) {
        uintptr_t out_begin = (uintptr_t)args->out, lse_begin = (uintptr_t)args->lse;
        uintptr_t out_end = out_begin + 2 * extent_of(size, out, KBMLA_HEAD_DIM_V);
        uintptr_t lse_end = lse_begin + 4 * extent_of(size, lse, 1);
        RETURN_IF(out_begin < lse_end && lse_begin < out_end, err, KBMLA_INVALID_ARGUMENT,
                  "lse: expected memory apart from out's, got overlapping ranges");
    }
    return KBMLA_OK;
}

/* GPU kernels copy 16 bytes at a time: rows must start at multiples of that. */
static kbmla_status check_aligned(kbmla_error *err, const char *name, const void *pointer,
                                  int64_t element_bytes, const int64_t size[3],
                                  const int64_t stride[3]) {
    RETURN_IF((uintptr_t)pointer % 16 != 0, err, KBMLA_INVALID_ARGUMENT,
              "%s: expected 16-byte alignment on a GPU, got address %p", name, pointer);
    for (int i = 0; i < 3; i++)
        RETURN_IF(size[i] > 1 && stride[i] * element_bytes % 16 != 0, err, KBMLA_INVALID_ARGUMENT,
                  "%s: expected strides of a multiple of %lld elements on a GPU, got %lld", name,
                  16 / (long long)element_bytes, (long long)stride[i]);
    return KBMLA_OK;
}

static kbmla_status check_aligned_out(kbmla_error *err, const kbmla_config *config,
                                      const kbmla_decode_args *args) {
    const int64_t rows[3] = {args->num_requests, config->q_len, config->num_heads};
    const int64_t out[3] = {args->out_batch_stride, args->out_token_stride, args->out_head_stride};
    return check_aligned(err, "out", args->out, 2, rows, out);
}

static kbmla_status check_aligned_rows(kbmla_error *err, const kbmla_config *config,
                                       const kbmla_decode_args *args) {
    const int64_t rows[3] = {args->num_requests, config->q_len, config->num_heads};
    const int64_t pages[3] = {args->num_pages, args->page_size, 1};
    const int64_t query[3] = {args->query_batch_stride, args->query_token_stride,
                              args->query_head_stride};
    const int64_t cache[3] = {args->cache_page_stride, args->cache_row_stride, 0};
    FORWARD_IF_ERROR(check_aligned(err, "query", args->query, 1, rows, query));
    FORWARD_IF_ERROR(check_aligned(err, "cache", args->cache, 1, pages, cache));
    return check_aligned_out(err, config, args);
}

static kbmla_status check_workspace(kbmla_error *err, const kbmla_sizes *sizes,
                                    const kbmla_decode_args *args) {
    RETURN_IF(args->workspace_bytes < sizes->workspace_bytes, err, KBMLA_BUFFER_TOO_SMALL,
              "workspace: expected at least %lld bytes, got %lld",
              (long long)sizes->workspace_bytes, (long long)args->workspace_bytes);
    RETURN_IF((uintptr_t)args->workspace % 16 != 0, err, KBMLA_INVALID_ARGUMENT,
              "workspace: expected 16-byte alignment, got address %p", args->workspace);
    return sizes->workspace_bytes > 0 ? check_pointer(err, "workspace", args->workspace) : KBMLA_OK;
}

/* 448 * 448 * 576, the largest raw score there is, must stay finite under the scale in base 2. */
static kbmla_status check_softmax_scale(kbmla_error *err, double scale) {
    const double most = 3.4028234e38 / (1.4426950408889634 * 448.0 * 448.0 * KBMLA_HEAD_DIM_QK);
    RETURN_IF(!((float)scale > 0.0f) || scale > most, err, KBMLA_INVALID_ARGUMENT,
              "softmax_scale: expected a scale > 0 and <= %g, got %g", most, scale);
    return KBMLA_OK;
}

static kbmla_status check_scale(kbmla_error *err, const char *name, double scale) {
    /* The kernels hold scales as floats: one that under- or overflows there is refused too. */
    RETURN_IF(!((float)scale > 0.0f) || !isfinite((float)scale), err, KBMLA_INVALID_ARGUMENT,
              "%s: expected a finite scale > 0, got %g", name, scale);
    return KBMLA_OK;
}

/* What decode and reduce share. */
static kbmla_status check_merge(kbmla_error *err, const kbmla_config *config,
                                const kbmla_sizes *sizes, const kbmla_decode_args *args) {
    FORWARD_IF_ERROR(check_requests(err, args->num_requests, config->max_requests));
    FORWARD_IF_ERROR(
        check_plan_buffers(err, sizes, args->num_requests, args->counts_len, args->work_len));
    FORWARD_IF_ERROR(check_scale(err, "output_scale", args->output_scale));
    RETURN_IF(args->page_size < 1 || args->page_size > KBMLA_MAX_PAGE_SIZE ||
                  (args->page_size & (args->page_size - 1)) != 0,
              err, KBMLA_INVALID_ARGUMENT,
              "cache: expected a page size that is a power of two in 1..%d, got %lld",
              KBMLA_MAX_PAGE_SIZE, (long long)args->page_size);
    RETURN_IF(args->max_pages < 0, err, KBMLA_INVALID_ARGUMENT,
              "block_table: expected >= 0 columns, got %lld", (long long)args->max_pages);
    if (args->num_requests == 0)
        return KBMLA_OK;
    FORWARD_IF_ERROR(check_pointer(err, "lengths", args->lengths));
    FORWARD_IF_ERROR(check_pointer(err, "counts", args->counts));
    FORWARD_IF_ERROR(check_pointer(err, "work", args->work));
    FORWARD_IF_ERROR(check_workspace(err, sizes, args));
    return check_written(err, config, args);
}

static kbmla_status check_context_parallel(kbmla_error *err, const kbmla_decode_args *args) {
    RETURN_IF(args->cp_world < 1, err, KBMLA_INVALID_ARGUMENT,
              "cp: expected world >= 1, got world %d", args->cp_world);
    RETURN_IF(args->cp_rank < 0 || args->cp_rank >= args->cp_world, err, KBMLA_INVALID_ARGUMENT,
              "cp: expected 0 <= rank < world %d, got rank %d", args->cp_world, args->cp_rank);
    RETURN_IF(args->cp_interleave < 1, err, KBMLA_INVALID_ARGUMENT,
              "cp: expected interleave >= 1, got interleave %d", args->cp_interleave);
    RETURN_IF(args->cp_world > 1 && args->causal_lens == NULL && args->num_requests > 0, err,
              KBMLA_INVALID_ARGUMENT,
              "totals: expected the global lengths with cp world %d, got none", args->cp_world);
    return KBMLA_OK;
}

/* ------------------------------------------------------------------ the verbs */

kbmla_status kbmla_prepare(const kbmla_config *config, int32_t *num_clusters, kbmla_error *err) {
    kbmla_sizes sizes;
    FORWARD_IF_ERROR(kbmla_config_sizes(config, &sizes, err));
    RETURN_IF(backend_of(config) == NULL, err, KBMLA_UNSUPPORTED, "backend %d is not in this build",
              config->backend);
    int32_t width = 1;
#if defined(KBMLA_HAS_CUDA)
    if (config->backend != KBMLA_BACKEND_CPU) {
        kbmla_cuda_device device;
        FORWARD_IF_ERROR(kbmla_cuda_current_device(&device, err));
        if (config->backend == KBMLA_BACKEND_SM90) {
            FORWARD_IF_ERROR(kbmla_sm90_decode_prepare(&sizes, &device, err));
            width = kbmla_sm90_decode_clusters(&sizes, &device);
        } else {
            FORWARD_IF_ERROR(kbmla_cuda_decode_prepare(&sizes, &device, err));
            width = kbmla_cuda_decode_clusters(&sizes, &device);
        }
    }
#endif
    if (num_clusters != NULL)
        *num_clusters = width;
    return KBMLA_OK;
}

kbmla_status kbmla_plan(const kbmla_config *config, const kbmla_plan_args *args,
                        struct CUstream_st *stream, kbmla_error *err) {
    kbmla_sizes sizes;
    FORWARD_IF_ERROR(kbmla_config_sizes(config, &sizes, err));
    FORWARD_IF_ERROR(check_requests(err, args->num_requests, config->max_requests));
    FORWARD_IF_ERROR(
        check_plan_buffers(err, &sizes, args->num_requests, args->counts_len, args->work_len));
    FORWARD_IF_ERROR(check_pointer(err, "work", args->work));
    if (args->num_requests > 0) {
        FORWARD_IF_ERROR(check_pointer(err, "lengths", args->lengths));
        FORWARD_IF_ERROR(check_pointer(err, "counts", args->counts));
    }
    const struct kbmla_backend_table *backend = backend_of(config);
    RETURN_IF(backend == NULL, err, KBMLA_UNSUPPORTED, "backend %d is not in this build",
              config->backend);
    return backend->plan(config, &sizes, args, stream, err);
}

kbmla_status kbmla_decode(const kbmla_config *config, const kbmla_decode_args *args,
                          struct CUstream_st *stream, kbmla_error *err) {
    kbmla_sizes sizes;
    FORWARD_IF_ERROR(kbmla_config_sizes(config, &sizes, err));
    FORWARD_IF_ERROR(check_merge(err, config, &sizes, args));
    FORWARD_IF_ERROR(check_softmax_scale(err, args->softmax_scale));
    FORWARD_IF_ERROR(check_context_parallel(err, args));
    FORWARD_IF_ERROR(check_stride(err, "query", args->query_batch_stride));
    FORWARD_IF_ERROR(check_stride(err, "query", args->query_token_stride));
    FORWARD_IF_ERROR(check_stride(err, "query", args->query_head_stride));
    FORWARD_IF_ERROR(check_stride(err, "cache", args->cache_page_stride));
    FORWARD_IF_ERROR(check_stride(err, "cache", args->cache_row_stride));
    FORWARD_IF_ERROR(check_stride(err, "block_table", args->block_table_stride));
    const struct kbmla_backend_table *backend = backend_of(config);
    RETURN_IF(backend == NULL, err, KBMLA_UNSUPPORTED, "backend %d is not in this build",
              config->backend);
    if (args->num_requests == 0)
        return KBMLA_OK;
    FORWARD_IF_ERROR(check_pointer(err, "query", args->query));
    if (args->max_pages > 0) {
        FORWARD_IF_ERROR(check_pointer(err, "block_table", args->block_table));
        if (args->num_pages > 0)
            FORWARD_IF_ERROR(check_pointer(err, "cache", args->cache));
    }
    if (config->backend != KBMLA_BACKEND_CPU)
        FORWARD_IF_ERROR(check_aligned_rows(err, config, args));
    FORWARD_IF_ERROR(backend->decode(config, &sizes, args, stream, err));
    return backend->reduce(config, &sizes, args, stream, err);
}

kbmla_status kbmla_reduce(const kbmla_config *config, const kbmla_decode_args *args,
                          struct CUstream_st *stream, kbmla_error *err) {
    kbmla_sizes sizes;
    FORWARD_IF_ERROR(kbmla_config_sizes(config, &sizes, err));
    FORWARD_IF_ERROR(check_merge(err, config, &sizes, args));
    const struct kbmla_backend_table *backend = backend_of(config);
    RETURN_IF(backend == NULL, err, KBMLA_UNSUPPORTED, "backend %d is not in this build",
              config->backend);
    if (config->backend != KBMLA_BACKEND_CPU && args->num_requests > 0)
        FORWARD_IF_ERROR(check_aligned_out(err, config, args));
    if (args->num_requests == 0)
        return KBMLA_OK;
    /* The reduce reads the plan ahead of its wait, which only a decode before it makes safe. */
    kbmla_decode_args alone = *args;
    alone.pdl = 0;
    return backend->reduce(config, &sizes, &alone, stream, err);
}
