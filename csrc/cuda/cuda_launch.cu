/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device facts and launches shared by the CUDA backends. The runtime is linked statically and loads
 * the driver on first use, so nothing here runs, or needs a driver, at import.
 */
#include "cuda_launch.h"

#include <atomic>
#include <mutex>

namespace {

enum { MAX_DEVICES = 64 };

/* An entry is complete once is_known says so; two threads may find the same facts at once. */
kbmla_cuda_device known_devices[MAX_DEVICES];
std::atomic<bool> is_known[MAX_DEVICES];
std::mutex fill_lock;

kbmla_status query(int index, kbmla_cuda_device *device, kbmla_error *err) {
    int major = 0, minor = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&device->num_sms, cudaDevAttrMultiProcessorCount, index),
               err);
    CUDA_CHECK(cudaDeviceGetAttribute(&device->smem_per_block,
                                      cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
               err);
    CUDA_CHECK(cudaDeviceGetAttribute(&device->smem_per_sm,
                                      cudaDevAttrMaxSharedMemoryPerMultiprocessor, index),
               err);
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), err);
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index), err);
    device->has_pdl = major >= 9;
    device->is_sm90 = major == 9 && minor == 0;
    device->plans_in_cluster = 0;
    return major >= 9 ? kbmla_cuda_plan_cluster_fits(&device->plans_in_cluster, err) : KBMLA_OK;
}

} // namespace

extern "C" kbmla_status kbmla_cuda_current_device(kbmla_cuda_device *device, kbmla_error *err) {
    int index = 0;
    CUDA_CHECK(cudaGetDevice(&index), err);
    if (index >= MAX_DEVICES)
        return query(index, device, err);
    if (!is_known[index].load(std::memory_order_acquire)) {
        kbmla_cuda_device found;
        FORWARD_IF_ERROR(query(index, &found, err));
        std::lock_guard<std::mutex> guard(fill_lock);
        if (!is_known[index].load(std::memory_order_relaxed))
            known_devices[index] = found;
        is_known[index].store(true, std::memory_order_release);
    }
    *device = known_devices[index];
    return KBMLA_OK;
}

kbmla_status kbmla_cuda_fail(kbmla_error *err, cudaError_t code, const char *call) {
    cudaGetLastError();
    kbmla_fail(err, KBMLA_CUDA, "%s: %s (%d)", call, cudaGetErrorString(code), (int)code);
    if (err != NULL)
        err->cuda_code = code;
    return KBMLA_CUDA;
}

kbmla_status kbmla_cuda_launch(const void *kernel, int32_t blocks, int32_t cluster_blocks,
                               int32_t threads, int32_t smem_bytes, bool pdl, void **arguments,
                               cudaStream_t stream, kbmla_error *err) {
    cudaLaunchAttribute attributes[2] = {};
    unsigned used = 0;
    if (pdl) {
        attributes[used].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[used++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster_blocks > 1) {
        attributes[used].id = cudaLaunchAttributeClusterDimension;
        attributes[used++].val.clusterDim = {(unsigned)cluster_blocks, 1, 1};
    }
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3((unsigned)blocks);
    launch.blockDim = dim3((unsigned)threads);
    launch.dynamicSmemBytes = (size_t)smem_bytes;
    launch.stream = stream;
    launch.attrs = attributes;
    launch.numAttrs = used;
    CUDA_CHECK(cudaLaunchKernelExC(&launch, kernel, arguments), err);
    return KBMLA_OK;
}
