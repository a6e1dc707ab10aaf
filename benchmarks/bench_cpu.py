# SPDX-License-Identifier: Apache-2.0
"""CPU decode against the best eager PyTorch formulation, in one run: ratios of medians.

The PyTorch side gathers a request's pages, dequantises them once to the fastest dtype of this
machine (each candidate is tried on the batch, the fastest counts), multiplies, takes the softmax in
that dtype or in float32, whichever is faster, and multiplies again. Same threads on both sides;
the two are interleaved so that a slow spell of the machine hits both.

Also checks what the decode may use of memory: no allocation by it, and a process peak below 1.2
times cache + outputs above the baseline (`--memory`, in a child process).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kbmla import BalancedMla, build_info, workloads

SCALES = (192**-0.5, 1.0)
SHAPES = ((12, 1), (64, 1), (96, 1), (12, 4), (64, 4), (96, 4))
# Least speed-up over PyTorch by query rows of a request.
WANTED = {12: 3.0, 48: 1.5, 64: 1.5, 96: 1.5, 256: 0.9, 384: 0.9}


def batches() -> dict[str, list[int]]:
    """The KV lengths of each benchmark batch."""
    return {
        "1x32K": workloads.uniform(1, 32768),
        "16x4K": workloads.uniform(16, 4096),
        "azure-code x16": workloads.draw("azure-code", 16, 1),
        "mooncake-conversation x6": workloads.draw("mooncake-conversation", 6, 1),
    }


def eager(batch: workloads.Batch, dtype: torch.dtype, softmax_dtype: torch.dtype) -> Tensor:
    """Attention as plain PyTorch does it fastest: [B, q, heads, 512] in `dtype`."""
    requests, q, heads, _ = batch.query.shape
    page = batch.cache.shape[1]
    out = torch.empty(requests, q, heads, 512, dtype=dtype)
    for b, length in enumerate(batch.lengths.tolist()):
        pages = batch.block_table[b, : -(-length // page)].long()
        kv = batch.cache[pages].view(-1, 576)[:length].to(dtype)
        query = batch.query[b].to(dtype).view(q * heads, 576)
        scores = (query @ kv.T).view(q, heads, length).to(softmax_dtype).mul_(SCALES[0])
        for t in range(q - 1):
            scores[t, :, length - (q - 1) + t :] = float("-inf")
        p = torch.softmax(scores, -1).to(dtype).view(q * heads, length)
        out[b] = (p @ kv[:, :512]).view(q, heads, 512)
    return out


def median_ms(runs: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median time of each callable, called in turn."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repeats):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


def prepare(batch: workloads.Batch) -> tuple[BalancedMla, Tensor, Callable[[], None]]:
    """A planned BalancedMla, its output, and the call that decodes one layer."""
    requests, q, heads, _ = batch.query.shape
    mla = BalancedMla(heads, "cpu", False)
    mla.require(q, requests)
    mla.plan(q, batch.lengths)
    out = torch.empty(requests, q, heads, 512, dtype=torch.bfloat16)

    def decode() -> None:
        mla.decode(batch.query, batch.cache, batch.block_table, batch.lengths, SCALES, out)

    return mla, out, decode


def measure(name: str, lengths: list[int], heads: int, q: int, repeats: int) -> dict[str, object]:
    """One row of the table."""
    batch = workloads.paged_cache(lengths, 64, heads=heads, q=q, seed=1)
    _, out, decode = prepare(batch)
    candidates = [
        (dtype, softmax)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for softmax in {torch.float32, dtype}
    ]
    trial = median_ms([lambda c=c: eager(batch, *c) for c in candidates], 1)  # type: ignore[misc]
    best = candidates[trial.index(min(trial))]
    ours, theirs = median_ms([decode, lambda: eager(batch, *best)], repeats)
    reference = eager(batch, torch.float32, torch.float32)
    error = ((out.float() - reference).norm() / reference.norm()).item()
    rows = heads * q
    return {
        "batch": name,
        "heads": heads,
        "q": q,
        "tokens": sum(lengths),
        "kbmla_ms": round(ours, 2),
        "torch_ms": round(theirs, 2),
        "torch_dtype": str(best[0]).removeprefix("torch."),
        "ratio": round(theirs / ours, 2),
        "wanted": WANTED[rows],
        "error": round(error, 5),
    }


def peak_resident() -> int:
    """Most bytes this process ever had in memory (getrusage would count its parent's too)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def peak_memory() -> tuple[int, int]:
    """(bytes the process peaked at above its state before cache and outputs, cache + outputs)."""
    warm = workloads.paged_cache([256], 64, heads=12, q=1, seed=1)
    prepare(warm)[2]()
    before = peak_resident()
    lengths, page = [60_000] * 16, 64
    pages = sum(-(-length // page) for length in lengths)
    # Not zeros: those would be pages that the system shares and never counts.
    cache = torch.full((pages, page, 576), 0x30, dtype=torch.uint8).view(torch.float8_e4m3fn)
    table = torch.arange(pages, dtype=torch.int32).view(16, -1)
    query = torch.zeros(16, 1, 12, 576, dtype=torch.uint8).view(torch.float8_e4m3fn)
    length = torch.tensor(lengths, dtype=torch.int32)
    _, out, decode = prepare(workloads.Batch(query, cache, table, length))
    decode()
    after = peak_resident()
    return after - before, cache.numel() + out.numel() * 2


def main() -> int:
    """Runs the benchmark; exit 1 when a wanted ratio or the memory bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7, help="timed runs per row (default 7)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--only", help="run only batches whose name contains this")
    parser.add_argument("--memory", action="store_true", help="print the peak memory and stop")
    args = parser.parse_args()
    if args.memory:
        peak, floor = peak_memory()
        print(json.dumps({"peak_bytes": peak, "cache_and_outputs_bytes": floor}))
        return 0

    for key, value in build_info().items():
        print(f"{key}: {value}")
    print(f"threads: {torch.get_num_threads()}\n")
    header = f"{'batch':26} {'heads':>5} {'q':>2} {'kbmla ms':>9} {'torch ms':>9} {'dtype':>9}"
    print(header + f" {'ratio':>6} {'wanted':>6} {'rel err':>8}", flush=True)
    rows = []
    for name, lengths in batches().items():
        if args.only and args.only not in name:
            continue
        for heads, q in SHAPES:
            row = measure(name, lengths, heads, q, args.repeats)
            rows.append(row)
            print(
                f"{row['batch']:26} {row['heads']:5} {row['q']:2} {row['kbmla_ms']:9} "
                f"{row['torch_ms']:9} {row['torch_dtype']:>9} {row['ratio']:6} {row['wanted']:6} "
                f"{row['error']:8}",
                flush=True,
            )
    child = subprocess.run(
        [sys.executable, __file__, "--memory"], capture_output=True, text=True, check=True
    )
    memory = json.loads(child.stdout)
    share = memory["peak_bytes"] / memory["cache_and_outputs_bytes"]
    print(f"\npeak memory over cache + outputs (16 x 60,000 tokens): {share:.3f}, wanted below 1.2")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "memory": memory}, indent=1))
    missed = [r for r in rows if float(str(r["ratio"])) < float(str(r["wanted"]))]
    for row in missed:
        print(f"below the wanted ratio: {row['batch']} heads {row['heads']} q {row['q']}")
    return 1 if missed or share >= 1.2 else 0


if __name__ == "__main__":
    sys.exit(main())
