// SPDX-License-Identifier: Apache-2.0
// Binding of the three verbs to torch, on LibTorch's stable ABI and Python's limited API: one built
// file serves torch >= 2.10 and Python >= 3.10. It turns tensors into pointers and strides, checks
// what a pointer cannot tell (type, rank, device, contiguous last dimension) and turns a status
// into an exception. "kbmla STATUS: text" is the form that kbmla/ops.py reads back.
#include <Python.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/version.h>

#include "../kbmla.h"

// In LibTorch's CUDA part only: absent, and never called, under a CPU build of torch.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream);

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] void fail(kbmla_status status, const std::string &text) {
    throw std::runtime_error(std::string("kbmla ") + kbmla_status_name(status) + ": " + text);
}

void check(kbmla_status status, const kbmla_error &error) {
    if (status != KBMLA_OK)
        fail(status, error.text);
}

std::string shape_text(const int64_t *sizes, size_t rank) {
    std::string text = "[";
    for (size_t i = 0; i < rank; i++)
        text += (i ? ", " : "") + (sizes[i] < 0 ? std::string("*") : std::to_string(sizes[i]));
    return text + "]";
}

const char *dtype_text(ScalarType type) {
    switch (type) {
    case ScalarType::Float8_e4m3fn:
        return "float8_e4m3fn";
    case ScalarType::BFloat16:
        return "bfloat16";
    case ScalarType::Half:
        return "float16";
    case ScalarType::Float:
        return "float32";
    case ScalarType::Double:
        return "float64";
    case ScalarType::Int:
        return "int32";
    case ScalarType::Long:
        return "int64";
    case ScalarType::Char:
        return "int8";
    case ScalarType::Byte:
        return "uint8";
    default:
        return "another dtype";
    }
}

// The device of a call is that of its buffers, which the core's backend fixes; every other tensor
// must be on it.
class Checker {
  public:
    Checker(const kbmla_config &config, const char *name, const Tensor &buffer)
        : is_cpu_(buffer.is_cpu()), index_(buffer.get_device_index()) {
        if (is_cpu_ != (config.backend == KBMLA_BACKEND_CPU))
            fail(KBMLA_INVALID_ARGUMENT, std::string(name) + ": expected a device of type " +
                                             (is_cpu_ ? "cuda" : "cpu") + ", got " +
                                             device_text(is_cpu_, index_));
    }

    // Wanted sizes of -1 are free. Unless `any_stride`, the last dimension must be contiguous.
    void tensor(const char *name, const Tensor &tensor, ScalarType dtype,
                std::initializer_list<int64_t> wanted, bool any_stride = false) const {
        auto sizes = tensor.sizes();
        if (tensor.scalar_type() != dtype)
            fail(KBMLA_INVALID_ARGUMENT, std::string(name) + ": expected dtype " +
                                             dtype_text(dtype) + ", got " +
                                             dtype_text(tensor.scalar_type()));
        bool same = sizes.size() == wanted.size();
        for (size_t i = 0; same && i < wanted.size(); i++)
            same = wanted.begin()[i] < 0 || sizes[i] == wanted.begin()[i];
        if (!same)
            fail(KBMLA_INVALID_ARGUMENT, std::string(name) + ": expected shape " +
                                             shape_text(wanted.begin(), wanted.size()) + ", got " +
                                             shape_text(sizes.data(), sizes.size()));
        if (tensor.is_cpu() != is_cpu_ || tensor.get_device_index() != index_)
            fail(KBMLA_INVALID_ARGUMENT,
                 std::string(name) + ": expected device " + device_text(is_cpu_, index_) +
                     ", got " + device_text(tensor.is_cpu(), tensor.get_device_index()));
        size_t last = sizes.size() - 1;
        if (!any_stride && sizes[last] > 1 && tensor.stride(static_cast<int64_t>(last)) != 1)
            fail(KBMLA_INVALID_ARGUMENT,
                 std::string(name) + ": expected stride 1 in the last dimension, got " +
                     std::to_string(tensor.stride(static_cast<int64_t>(last))));
    }

  private:
    static std::string device_text(bool is_cpu, int32_t index) {
        return is_cpu ? "cpu" : "cuda:" + std::to_string(index);
    }

    bool is_cpu_;
    int32_t index_;
};

// The fields of kbmla_config after struct_size, in order; p_scale is whole.
kbmla_config make_config(const std::vector<int64_t> &fields) {
    if (fields.size() != 12)
        fail(KBMLA_INVALID_ARGUMENT,
             "config: expected 12 integers, got " + std::to_string(fields.size()));
    for (int64_t field : fields)
        if (field < INT32_MIN || field > INT32_MAX)
            fail(KBMLA_INVALID_ARGUMENT,
                 "config: expected 32-bit integers, got " + std::to_string(field));
    auto at = [&](size_t i) { return static_cast<int32_t>(fields[i]); };
    kbmla_config config = KBMLA_CONFIG_INIT;
    config.num_heads = at(0);
    config.q_len = at(1);
    config.max_requests = at(2);
    config.num_clusters = at(3);
    config.capacity = at(4);
    config.min_split_tokens = at(5);
    config.policy = at(6);
    config.backend = at(7);
    config.causal = at(8);
    config.partial_fp16 = at(9);
    config.reducer_d_tiles = at(10);
    config.p_scale = static_cast<float>(fields[11]);
    kbmla_error error = {};
    check(kbmla_config_check(&config, &error), error);
    return config;
}

int32_t request_count(const kbmla_config &config, int64_t requests) {
    if (requests > config.max_requests)
        fail(KBMLA_INVALID_ARGUMENT, "requests: expected at most " +
                                         std::to_string(config.max_requests) +
                                         ", as prepared, got " + std::to_string(requests));
    return static_cast<int32_t>(requests);
}

// Where a call runs: on torch's current stream of the buffer's device, with that device current.
class Launch {
  public:
    explicit Launch(const Tensor &buffer) {
        if (buffer.is_cpu())
            return;
        int32_t index = buffer.get_device_index();
        guard_.emplace(index);
        void *stream = nullptr;
        if (aoti_torch_get_current_cuda_stream == nullptr ||
            aoti_torch_get_current_cuda_stream(index, &stream) != 0)
            fail(KBMLA_CUDA, "no current stream of cuda:" + std::to_string(index));
        stream_ = static_cast<CUstream_st *>(stream);
    }
    CUstream_st *stream() const { return stream_; }

  private:
    std::optional<torch::stable::accelerator::DeviceGuard> guard_;
    CUstream_st *stream_ = nullptr;
};

void torch_pool(int64_t count, kbmla_parallel_body body, void *context, void *) {
    if (torch_parallel_for(0, count, 1, body, context) != 0)
        body(0, count, context);
}

// ---------------------------------------------------------------------------------------- verbs

void plan(const Tensor &lengths, const Tensor &counts, const Tensor &work,
          std::vector<int64_t> fields) {
    kbmla_config config = make_config(fields);
    Checker checker(config, "work", work);
    checker.tensor("lengths", lengths, ScalarType::Int, {-1});
    checker.tensor("counts", counts, ScalarType::Int, {-1});
    checker.tensor("work", work, ScalarType::Int, {-1});
    kbmla_plan_args args = {};
    args.num_requests = request_count(config, lengths.numel());
    args.lengths = lengths.const_data_ptr<int32_t>();
    args.counts = counts.mutable_data_ptr<int32_t>();
    args.counts_len = counts.numel();
    args.work = work.mutable_data_ptr<int32_t>();
    args.work_len = work.numel();
    kbmla_error error = {};
    Launch launch(work);
    check(kbmla_plan(&config, &args, launch.stream(), &error), error);
}

// What decode and reduce take alike; the request count follows from lengths.
kbmla_decode_args merge_args(const kbmla_config &config, const Checker &checker,
                             const Tensor &lengths, const Tensor &counts, const Tensor &work,
                             const Tensor &workspace, const Tensor &out,
                             const std::optional<Tensor> &lse, double output_scale) {
    int64_t requests = out.dim() > 0 ? out.size(0) : 0;
    kbmla_decode_args args = {};
    args.num_requests = request_count(config, requests);
    checker.tensor("lengths", lengths, ScalarType::Int, {requests});
    checker.tensor("counts", counts, ScalarType::Int, {-1});
    checker.tensor("work", work, ScalarType::Int, {-1});
    checker.tensor("workspace", workspace, ScalarType::Char, {-1});
    checker.tensor("out", out, ScalarType::BFloat16,
                   {requests, config.q_len, config.num_heads, KBMLA_HEAD_DIM_V});
    args.lengths = lengths.const_data_ptr<int32_t>();
    args.counts = counts.const_data_ptr<int32_t>();
    args.counts_len = counts.numel();
    args.work = work.const_data_ptr<int32_t>();
    args.work_len = work.numel();
    args.workspace = workspace.mutable_data_ptr();
    args.workspace_bytes = workspace.numel();
    args.out = static_cast<uint16_t *>(out.mutable_data_ptr());
    args.out_batch_stride = out.stride(0);
    args.out_token_stride = out.stride(1);
    args.out_head_stride = out.stride(2);
    if (lse.has_value()) {
        checker.tensor("lse", *lse, ScalarType::Float, {requests, config.q_len, config.num_heads},
                       /*any_stride=*/true);
        args.lse = lse->mutable_data_ptr<float>();
        args.lse_batch_stride = lse->stride(0);
        args.lse_token_stride = lse->stride(1);
        args.lse_head_stride = lse->stride(2);
    }
    args.output_scale = output_scale;
    args.parallel_for = torch_pool;
    return args;
}

void decode(const Tensor &query, const Tensor &cache, const Tensor &block_table,
            const Tensor &lengths, const std::optional<Tensor> &causal_lens, const Tensor &counts,
            const Tensor &work, const Tensor &workspace, const Tensor &out,
            const std::optional<Tensor> &lse, double softmax_scale, double output_scale,
            int64_t cp_world, int64_t cp_rank, int64_t cp_interleave, bool pdl,
            std::vector<int64_t> fields) {
    kbmla_config config = make_config(fields);
    Checker checker(config, "workspace", workspace);
    int64_t requests = query.dim() > 0 ? query.size(0) : 0;
    checker.tensor("query", query, ScalarType::Float8_e4m3fn,
                   {-1, config.q_len, config.num_heads, KBMLA_HEAD_DIM_QK});
    checker.tensor("out", out, ScalarType::BFloat16,
                   {requests, config.q_len, config.num_heads, KBMLA_HEAD_DIM_V});
    checker.tensor("cache", cache, ScalarType::Float8_e4m3fn, {-1, -1, KBMLA_HEAD_DIM_QK});
    checker.tensor("block_table", block_table, ScalarType::Int, {requests, -1});
    kbmla_decode_args args =
        merge_args(config, checker, lengths, counts, work, workspace, out, lse, output_scale);
    if (causal_lens.has_value()) {
        checker.tensor("totals", *causal_lens, ScalarType::Int, {requests});
        args.causal_lens = causal_lens->const_data_ptr<int32_t>();
    }
    for (int64_t number : {cp_world, cp_rank, cp_interleave})
        if (number < INT32_MIN || number > INT32_MAX)
            fail(KBMLA_INVALID_ARGUMENT,
                 "cp: expected 32-bit integers, got " + std::to_string(number));
    args.query = static_cast<const uint8_t *>(query.const_data_ptr());
    args.query_batch_stride = query.stride(0);
    args.query_token_stride = query.stride(1);
    args.query_head_stride = query.stride(2);
    args.cache = static_cast<const uint8_t *>(cache.const_data_ptr());
    args.num_pages = cache.size(0);
    args.page_size = cache.size(1);
    args.cache_page_stride = cache.stride(0);
    args.cache_row_stride = cache.stride(1);
    args.block_table = block_table.const_data_ptr<int32_t>();
    args.max_pages = block_table.size(1);
    args.block_table_stride = block_table.stride(0);
    args.cp_world = static_cast<int32_t>(cp_world);
    args.cp_rank = static_cast<int32_t>(cp_rank);
    args.cp_interleave = static_cast<int32_t>(cp_interleave);
    args.softmax_scale = softmax_scale;
    args.pdl = pdl;
    kbmla_error error = {};
    Launch launch(workspace);
    check(kbmla_decode(&config, &args, launch.stream(), &error), error);
}

void reduce(const Tensor &lengths, const Tensor &counts, const Tensor &work,
            const Tensor &workspace, const Tensor &out, const std::optional<Tensor> &lse,
            double output_scale, int64_t max_tokens, std::vector<int64_t> fields) {
    kbmla_config config = make_config(fields);
    Checker checker(config, "workspace", workspace);
    kbmla_decode_args args =
        merge_args(config, checker, lengths, counts, work, workspace, out, lse, output_scale);
    args.max_pages = max_tokens;
    args.page_size = 1;
    kbmla_error error = {};
    Launch launch(workspace);
    check(kbmla_reduce(&config, &args, launch.stream(), &error), error);
}

} // namespace

STABLE_TORCH_LIBRARY(kbmla, m) {
    m.def("plan(Tensor lengths, Tensor(a!) counts, Tensor(b!) work, int[] config) -> ()");
    m.def("decode(Tensor query, Tensor cache, Tensor block_table, Tensor lengths, "
          "Tensor? causal_lens, Tensor counts, Tensor work, Tensor(a!) workspace, Tensor(b!) out, "
          "Tensor(c!)? lse, float softmax_scale, float output_scale, int cp_world, int cp_rank, "
          "int cp_interleave, bool pdl, int[] config) -> ()");
    m.def("reduce(Tensor lengths, Tensor counts, Tensor work, Tensor workspace, Tensor(a!) out, "
          "Tensor(b!)? lse, float output_scale, int max_tokens, int[] config) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kbmla, CPU, m) {
    m.impl("plan", TORCH_BOX(&plan));
    m.impl("decode", TORCH_BOX(&decode));
    m.impl("reduce", TORCH_BOX(&reduce));
}

STABLE_TORCH_LIBRARY_IMPL(kbmla, CUDA, m) {
    m.impl("plan", TORCH_BOX(&plan));
    m.impl("decode", TORCH_BOX(&decode));
    m.impl("reduce", TORCH_BOX(&reduce));
}

#define KBMLA_TEXT_OF(x) #x
#define KBMLA_TEXT(x) KBMLA_TEXT_OF(x)

// Version of torch the binding was compiled against, for build_info() and import errors.
extern "C" const char *kbmla_built_torch(void) {
    return KBMLA_TEXT(TORCH_VERSION_MAJOR) "." KBMLA_TEXT(TORCH_VERSION_MINOR) "." KBMLA_TEXT(
        TORCH_VERSION_PATCH);
}

// Importing the module is what registers the ops; it has no functions of its own.
extern "C" PyMODINIT_FUNC PyInit__C(void) {
    static PyModuleDef module = {
        PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
    return PyModule_Create(&module);
}
