"""Output tokens per second and attention time per step, beside vLLM's own FP8 backends."""

from __future__ import annotations

import argparse
import re
import time
import traceback
from typing import Any

import torch
from device_engine import DECODE_GRAPHS, KBMLA, SIZES, engine, model, print_table, save
from tiny_model import FIRST_TOKEN, VOCABULARY

# Kernels of the decode attention of each backend; the rest of a step is the same for all.
ATTENTION = re.compile(
    r"(cuda|sm90)_(plan|decode|reduce)|splitkv_mla|get_mla_metadata|mla_combine"
    r"|flash_fwd_mla|_fwd_(grouped_)?kernel_stage",
    re.IGNORECASE,
)
BATCHES = {"64 x 8K": [8192] * 64, "1 x 100K + 31 x 2K": [100_000] + [2048] * 31}
WARM, STEPS, PROFILED = 20, 100, 10
SPREAD = 0.99  # two runs of one engine differ by up to a hundredth


def speed(arguments: argparse.Namespace) -> bool:
    rows, good, kernels = [], True, {}
    for heads in arguments.heads:
        figures: dict[tuple[str, str], tuple[float, float]] = {}
        for backend in ("FLASHMLA", "TRITON_MLA", KBMLA):
            settings = dict(DECODE_GRAPHS["compilation_config"])
            settings["cudagraph_capture_sizes"] = [*SIZES, 64]
            options = {
                "compilation_config": settings,
                "max_model_len": 131072,
                "max_num_seqs": 64,
                "max_num_batched_tokens": 16384,
                "num_gpu_blocks_override": 10000,
                "gpu_memory_utilization": 0.4,
            }
            try:
                with engine(model(heads, arguments.layers), backend, "fp8", **options) as llm:
                    for name, lengths in BATCHES.items():
                        figures[backend, name], found = measure(llm, lengths)
                        kernels[f"{heads} {backend} {name}"] = found
            except Exception:
                traceback.print_exc()
                good = False
        for name in BATCHES:
            base = figures.get(("FLASHMLA", name))
            for backend in ("FLASHMLA", "TRITON_MLA", KBMLA):
                if (backend, name) not in figures:
                    rows.append([heads, name, backend, "-", "-", "-", "-", "FAIL"])
                    continue
                rate, attention = figures[backend, name]
                ratio = "" if base is None else f"{rate / base[0]:.3f}"
                slower = backend == KBMLA and base is not None and rate < SPREAD * base[0]
                good &= not slower
                rows.append(
                    [heads, name, backend, f"{rate:.0f}", ratio, f"{attention:.0f}",
                     f"{attention / arguments.layers:.1f}", "FAIL" if slower else "ok"]
                )  # fmt: skip
    save("speed-kernels", kernels)
    head = ["heads", "batch", "backend", "output tokens/s", "of FLASHMLA", "attention us/step",
            "per layer", ""]  # fmt: skip
    print_table(head, rows)
    return good


def measure(llm: Any, lengths: list[int]) -> tuple[tuple[float, float], list[list[Any]]]:
    """((output tokens per second, attention us per step), kernels by time) of decode steps in which
    all requests take part."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    serving = llm.llm_engine
    generator = torch.Generator().manual_seed(7)
    settings = SamplingParams(
        temperature=0,
        max_tokens=4000,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    names = [str(number) for number in range(len(lengths))]
    for name, length in zip(names, lengths, strict=True):
        tokens = torch.randint(FIRST_TOKEN, VOCABULARY, (length,), generator=generator).tolist()
        serving.add_request(name, {"prompt_token_ids": tokens}, settings)
    started: set[str] = set()
    while len(started) < len(names):
        started |= {output.request_id for output in serving.step()}
    for _ in range(WARM):
        serving.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    tokens = sum(len(serving.step()) for _ in range(STEPS))
    torch.cuda.synchronize()
    rate = tokens / (time.perf_counter() - began)

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            serving.step()
        torch.cuda.synchronize()
    found = sorted(
        ([event.key[:120], event.device_time_total / PROFILED, event.count / PROFILED]
         for event in profile.key_averages() if event.device_time_total > 0),
        key=lambda one: -one[1],
    )  # fmt: skip
    for key, spent, count in found[:6]:
        print(f"   {spent:9.1f} us/step  {count:6.1f} calls/step  {key[:90]}", flush=True)
    attention = sum(spent for key, spent, _ in found if ATTENTION.search(key))
    serving.abort_request(names)
    while serving.has_unfinished_requests():
        serving.step()
    return (rate, attention), found[:40]
