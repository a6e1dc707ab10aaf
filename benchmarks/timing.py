# SPDX-License-Identifier: Apache-2.0
"""What a GPU benchmark here times with: CUDA graphs, events, and the two ceilings of the card.

Nothing in here knows about attention. All functions work on torch's current CUDA device and stream;
times are microseconds on the GPU, so host time and launch latency are not counted as long as the
host enqueues faster than the GPU runs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = [
    "Ceilings",
    "capture",
    "ceilings",
    "event_times",
    "fitting_repeats",
    "fp8_matmul_rate",
    "gpu_state",
    "mean",
    "median",
    "read_bandwidth",
    "roofline_us",
    "sustained_times",
]

mean, median = statistics.fmean, statistics.median


# ---------------------------------------------------------------- graphs and events


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of everything `call` enqueues.

    `call` runs once before, on a side stream: what it does only the first time (module load,
    attributes of a kernel, the allocator's growth) must not fall into the capture.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def event_times(
    calls: Sequence[Callable[[], object]], repeats: int, *, warmup: int = 2
) -> list[list[float]]:
    """Microseconds of `repeats` runs of each call; the calls take turns.

    Taking turns spreads a slow spell of the card over all of them. Nothing waits between the runs:
    the warm-up keeps the GPU busy while the host gets ahead, so a start event is never recorded on
    an idle GPU that then waits for the launch.
    """
    for _ in range(warmup):
        for call in calls:
            call()
    pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, mine in zip(calls, pairs, strict=True):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            mine.append((start, end))
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) * 1e3 for start, end in mine] for mine in pairs]


def sustained_times(calls: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Microseconds of each call's runs while it alone keeps the GPU busy, for twice half of
    `seconds`, each after as long a warm-up; the second halves come in reverse order, so that a card
    that warms up favours none. A load above the card's power limit is clocked down within that
    time; a few runs end before it is."""
    found: list[list[float]] = [[] for _ in calls]
    for i in [*range(len(calls)), *reversed(range(len(calls)))]:
        once = median(event_times([calls[i]], 3)[0])
        repeats = fitting_repeats(once, sys.maxsize, seconds / 2)
        found[i] += event_times([calls[i]], repeats, warmup=repeats)[0]
    return found


def fitting_repeats(round_us: float, wanted: int, seconds: float, least: int = 3) -> int:
    """How many rounds of `round_us` microseconds fit into `seconds`: `least` to `wanted`."""
    fit = int(seconds * 1e6 / max(round_us, 1e-3))
    return max(min(least, wanted), min(wanted, fit))


# ---------------------------------------------------------------- ceilings

# Every thread has eight independent 16-byte loads in flight, a block reads 32 KB at a time and the
# sum goes nowhere: the plainest read there is. On an H200 this pattern reaches 4.5 to 4.6 TB/s,
# where a copy of torch, reads and writes counted, stops at 4.3 (2026-10-28).
_READ_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(256)
read_all(const uint4 *data, int chunks, unsigned *sink) {
    unsigned sum = 0;
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const uint4 *p = data + (unsigned long long)chunk * 2048 + threadIdx.x;
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = p[i * 256];
#pragma unroll
        for (int i = 0; i < 8; i++) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    if (sum == 0x9e3779b9u) sink[threadIdx.x] = sum;
}
"""
_CHUNK_BYTES = 2048 * 16


class Ceilings(NamedTuple):
    """What the card reaches at best, measured.

    Attributes:
        read_bytes_per_s: of plain reads of memory.
        read_method: how that was measured.
        fp8_flops_per_s: of a large FP8 matrix product; None where torch has none for this card.
    """

    read_bytes_per_s: float
    read_method: str
    fp8_flops_per_s: float | None


def read_bandwidth(num_bytes: int = 2**32, repeats: int = 12) -> tuple[float, str]:
    """(bytes per second, method): the fastest plain read of `num_bytes` of random data.

    The 16-byte read kernel is compiled at run time through torch. Where that does not work, the
    faster of a float32 sum and a copy (bytes read plus bytes written) stands in, both a few per
    cent slower: a floor from them is that much too high.
    """
    data = torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda").random_()
    sink = torch.empty(256, dtype=torch.int32, device="cuda")
    try:
        kernel = torch.cuda._compile_kernel(_READ_SOURCE, "read_all")
        grid = (8 * torch.cuda.get_device_properties(data.device).multi_processor_count, 1, 1)
        arguments = [data, num_bytes // _CHUNK_BYTES, sink]

        def read() -> None:
            kernel(grid=grid, block=(256, 1, 1), args=arguments)

        times = event_times([read], repeats)[0]
        read_bytes = num_bytes // _CHUNK_BYTES * _CHUNK_BYTES
        return read_bytes / (median(times) * 1e-6), "16-byte loads"
    # Private to torch, and it needs NVRTC: any failure means the stand-ins, never the end.
    except Exception:
        floats, half = data.view(torch.float32), data.numel() // 2

        def copy() -> None:
            data[:half].copy_(data[half : 2 * half])

        total, copied = event_times([floats.sum, copy], repeats)
        found = [
            (floats.numel() * 4 / (median(total) * 1e-6), "torch.sum"),
            (2 * half * 4 / (median(copied) * 1e-6), "copy, read + written"),
        ]
        return max(found)


def fp8_matmul_rate(size: int = 8192, repeats: int = 10) -> float | None:
    """FLOP per second of a `size`^3 E4M3 product of Gaussian data with fast accumulation.

    None where this torch or this card has no such product.
    """
    shape = (size, size)
    try:
        a, b = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device="cuda")

        def multiply() -> None:
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        times = event_times([multiply], repeats)[0]
    except (RuntimeError, AttributeError, TypeError):
        return None
    return 2 * size**3 / (median(times) * 1e-6)


def ceilings() -> Ceilings:
    """Both ceilings of the current device; takes well under a second."""
    read, method = read_bandwidth()
    rate = fp8_matmul_rate()
    torch.cuda.empty_cache()
    return Ceilings(read, method, rate)


def roofline_us(num_bytes: float, flops: float, limits: Ceilings) -> tuple[float, float]:
    """(memory floor, larger of memory and matrix floor) in microseconds.

    Without a matrix rate both are the memory floor.
    """
    memory = num_bytes / limits.read_bytes_per_s * 1e6
    matrix = flops / limits.fp8_flops_per_s * 1e6 if limits.fp8_flops_per_s else 0.0
    return memory, max(memory, matrix)


# ---------------------------------------------------------------- state of the card

_STATE = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def gpu_state() -> dict[str, Any]:
    """Name and size of the current device and, where nvidia-smi answers, driver, clocks (MHz),
    power (W) and temperature (C) as they are. Reads only."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    state: dict[str, Any] = {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    command = [
        "nvidia-smi",
        f"--id=GPU-{properties.uuid}",
        f"--query-gpu={','.join(_STATE)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return state
    values = (value.strip() for value in answer.stdout.splitlines()[0].split(","))
    return state | dict(zip(_STATE, values, strict=False))
