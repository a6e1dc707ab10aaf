/*
 * Device facts and launches shared by the CUDA backends. The runtime is linked statically and loads
 * the driver on first use, so nothing here runs, or needs a driver, at import.
 */
#include "cuda_launch.h"

namespace {

enum { MAX_DEVICES = 64 };

/* Facts never change, so two threads that fill an entry at once write the same values; is_known is
 * stored last. */
kbmla_cuda_device known_devices[MAX_DEVICES];
volatile int is_known[MAX_DEVICES];

kbmla_status query(int index, kbmla_cuda_device *device, kbmla_error *err) {
    int major = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&device->num_sms, cudaDevAttrMultiProcessorCount, index),
               err);
    CUDA_CHECK(cudaDeviceGetAttribute(&device->smem_per_block,
                                      cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
               err);
    CUDA_CHECK(cudaDeviceGetAttribute(&device->smem_per_sm,
                                      cudaDevAttrMaxSharedMemoryPerMultiprocessor, index),
               err);
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), err);
    device->has_pdl = major >= 9;
    return KBMLA_OK;
}

} // namespace

extern "C" kbmla_status kbmla_cuda_current_device(kbmla_cuda_device *device, kbmla_error *err) {
    int index = 0;
    CUDA_CHECK(cudaGetDevice(&index), err);
    if (index >= MAX_DEVICES)
        return query(index, device, err);
    if (!is_known[index]) {
        FORWARD_IF_ERROR(query(index, &known_devices[index], err));
        __sync_synchronize();
        is_known[index] = 1;
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

kbmla_status kbmla_cuda_launch(const void *kernel, int32_t blocks, int32_t threads,
                               int32_t smem_bytes, bool pdl, void **arguments, cudaStream_t stream,
                               kbmla_error *err) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3((unsigned)blocks);
    launch.blockDim = dim3((unsigned)threads);
    launch.dynamicSmemBytes = (size_t)smem_bytes;
    launch.stream = stream;
    launch.attrs = &attribute;
    launch.numAttrs = pdl ? 1 : 0;
    CUDA_CHECK(cudaLaunchKernelExC(&launch, kernel, arguments), err);
    return KBMLA_OK;
}
