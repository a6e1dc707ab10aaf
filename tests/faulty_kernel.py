# SPDX-License-Identifier: Apache-2.0
"""A kernel with the fault that a tool of compute-sanitizer is for, so that a run of the tool that
finds nothing is known to have looked.

    compute-sanitizer --tool TOOL python faulty_kernel.py TOOL
"""

from __future__ import annotations

import sys

import torch

SOURCE = """
extern "C" __global__ void faulty_kernel(int *data, int tool) {
    __shared__ volatile int shared[64];
    if (tool == 0)
        data[1 << 20] = 1;
    if (tool == 1) {
        shared[threadIdx.x] = threadIdx.x;
        data[threadIdx.x] = shared[63 - threadIdx.x]; /* of the other warp */
    }
    if (tool == 2) {
        __syncwarp(1); /* not the lanes that are here */
        if (threadIdx.x % 2)
            __syncthreads();
    }
    if (tool == 3)
        data[threadIdx.x] += 1;
}
"""
TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]


def main() -> None:
    kernel = torch.cuda._compile_kernel(SOURCE, "faulty_kernel")
    data = torch.empty(64, dtype=torch.int32, device="cuda")
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[data, TOOLS.index(sys.argv[1])])
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
