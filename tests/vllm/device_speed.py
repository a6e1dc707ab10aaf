# SPDX-License-Identifier: Apache-2.0
"""Output tokens per second and attention time per step, beside vLLM's own FP8 backends."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from device_engine import DECODE_GRAPHS, KBMLA, SIZES, engine, model, print_table, save, use_runner
from device_jobs import FORK, Job, preload, run_jobs
from tiny_model import FIRST_TOKEN, VOCABULARY

# Kernels of the decode attention of each backend; the rest of a step is the same for all.
ATTENTION = re.compile(
    r"(cuda|sm90)_(plan|decode|reduce)|splitkv_mla|get_mla_metadata|mla_combine"
    r"|flash_fwd_mla|_fwd_(grouped_)?kernel_stage",
    re.IGNORECASE,
)
BESIDE = ["FLASHMLA", "TRITON_MLA"]
BATCHES = {"64 x 8K": [8192] * 64, "1 x 100K + 31 x 2K": [100_000] + [2048] * 31}
WARM, STEPS, LEAST, MOST_SECONDS, PROFILED = 20, 100, 8, 3, 10
ROUNDS = 3
SPREAD = 0.99  # two rounds of one engine differ by up to a hundredth
LOAD_SECONDS, MEASURE_SECONDS = 240, 60


def speed(arguments: argparse.Namespace) -> bool:
    use_runner(arguments.runner)
    preload()
    backends = [*arguments.beside, KBMLA]
    rows, good, kernels = [], True, {}
    for heads in arguments.heads:
        run_jobs({"model": partial(model, heads, arguments.layers)}, 1, LOAD_SECONDS)
        figures, found = measure_side_by_side(heads, arguments.layers, backends)
        kernels |= {f"{heads} {backend} {name}": one for (backend, name), one in found.items()}
        table, fine = tabulate(heads, arguments.layers, backends, figures)
        rows, good = rows + table, good and fine
        save("speed-kernels", kernels)
        print_table(HEAD, rows)
    return good


HEAD = ["heads", "batch", "backend", "output tokens/s", "rounds", "of FLASHMLA",
        "attention us/step", "per layer", "of FLASHMLA", ""]  # fmt: skip


def tabulate(
    heads: int,
    layers: int,
    backends: list[str],
    figures: dict[tuple[str, str], list[tuple[float, float]]],
) -> tuple[list[list[Any]], bool]:
    """Rows of HEAD, and whether kbmla is nowhere slower than FLASHMLA."""
    rows, good = [], True
    medians = {
        key: [statistics.median(column) for column in zip(*rounds, strict=True)]
        for key, rounds in figures.items()
    }
    for name in BATCHES:
        base = medians.get(("FLASHMLA", name))
        for backend in backends:
            if (backend, name) not in medians:
                rows.append([heads, name, backend, *["-"] * 6, "FAIL"])
                good = False
                continue
            rate, attention = medians[backend, name]
            ratios = ["", ""]
            if base is not None:
                ratios = [f"{rate / base[0]:.3f}", f"{base[1] / attention:.3f}"]
            slower = backend == KBMLA and (base is None or rate < SPREAD * base[0])
            good &= not slower
            each = " ".join(f"{one:.0f}" for one, _ in figures[backend, name])
            rows.append(
                [heads, name, backend, f"{rate:.0f}", each, ratios[0], f"{attention:.0f}",
                 f"{attention / layers:.1f}", ratios[1], "FAIL" if slower else "ok"]
            )  # fmt: skip
    return rows, good


def measure_side_by_side(heads: int, layers: int, backends: list[str]) -> tuple[dict, dict]:
    """(rounds of (output tokens/s, attention us/step), kernels by time), both by (backend, batch).

    The engines load together and then take turns, each alone at work, round by round, so that no
    backend has a warmer card than another.
    """
    jobs: dict[str, tuple[Job, Connection]] = {}
    for backend in backends:
        ours, theirs = FORK.Pipe()
        work = partial(serve_measurements, theirs, heads, layers, backend)
        jobs[backend] = Job(f"speed, {heads} heads, {backend}", work, 2 * LOAD_SECONDS), ours
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
    found: dict[tuple[str, str], list[list[Any]]] = {}
    alive = [one for one in backends if answer(*jobs[one], LOAD_SECONDS) == "loaded"]
    try:
        for number in range(ROUNDS):
            # Triton's is many times slower: once says it.
            for backend in [one for one in alive if number == 0 or one != "TRITON_MLA"]:
                job, connection = jobs[backend]
                for name in BATCHES:
                    connection.send(name)
                    got = answer(job, connection, MEASURE_SECONDS)
                    if got is None:
                        alive.remove(backend)
                        break
                    rate, attention, found[backend, name] = got
                    figures.setdefault((backend, name), []).append((rate, attention))
                    print(
                        f"-- round {number}, {name}, {backend}: {rate:.0f} tokens/s, attention "
                        f"{attention:.0f} us/step",
                        flush=True,
                    )
    finally:
        for job, _ in jobs.values():
            job.kill()
    return figures, found


def answer(job: Job, connection: Connection, seconds: float) -> Any:
    """What the engine of `job` sends next, or None if it ended or took longer."""
    end = time.time() + seconds
    while time.time() < end:
        if connection.poll(0.05):
            return connection.recv()
        if job.over():
            return None
    print(f"-- {job.name}: no answer within {seconds} s", flush=True)
    return None


def serve_measurements(connection: Connection, heads: int, layers: int, backend: str) -> None:
    """An engine that measures each batch it is asked for, until it is ended."""
    settings = dict(DECODE_GRAPHS["compilation_config"])
    settings["cudagraph_capture_sizes"] = [*SIZES, 64]
    options = {
        "compilation_config": settings,
        "max_model_len": 131072,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 10000,
        "gpu_memory_utilization": 0.03,
        "kv_cache_memory_bytes": (layers * 10000 * 64 * 576) + (1 << 30),
        "kv_transfer_config": {
            "kv_connector": "FilledCache",
            "kv_connector_module_path": "filled_cache",
            "kv_role": "kv_both",
        },
    }
    with engine(model(heads, layers), backend, "fp8", **options) as llm:
        connection.send("loaded")
        while True:
            connection.send(measure(llm, BATCHES[connection.recv()]))


def measure(llm: Any, lengths: list[int]) -> tuple[float, float, list[list[Any]]]:
    """(output tokens per second, attention us per step, kernels by time) of decode steps in which
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

    def timed(most: int) -> tuple[int, float]:
        """(tokens, seconds) of up to `most` steps, of slow ones fewer."""
        torch.cuda.synchronize()
        began, tokens = time.perf_counter(), 0
        for number in range(most):
            tokens += len(serving.step())
            if number >= LEAST and time.perf_counter() - began > MOST_SECONDS:
                break
        torch.cuda.synchronize()
        return tokens, time.perf_counter() - began

    timed(WARM)
    tokens, seconds = timed(STEPS)
    rate = tokens / seconds

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            serving.step()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    print_layer(kernels)
    spent: Counter[str] = Counter()
    for start, end, name in kernels:
        spent[name[:120]] += (end - start) / PROFILED
    serving.abort_request(names)
    while serving.has_unfinished_requests():
        serving.step()
    return rate, attention_time(kernels) / PROFILED, spent.most_common(40)


Kernel = tuple[float, float, str]  # start and end in us, name; lists of them ascend


def attention_time(kernels: list[Kernel]) -> float:
    """Time in which attention kernels ran and no other. Not the sum of their times: kernels that
    start early, as kbmla's do, wait inside of the ones before them."""
    attention = [one for one in kernels if ATTENTION.search(one[2])]
    others = [one for one in kernels if not ATTENTION.search(one[2])]
    return covered(kernels) - covered(others) if attention else 0.0


def covered(kernels: list[Kernel]) -> float:
    """Time in which any of `kernels` ran."""
    total, reached = 0.0, float("-inf")
    for start, end, _ in kernels:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def print_layer(kernels: list[Kernel]) -> None:
    """One layer in the middle: when each kernel starts and ends, in us."""
    decodes = [
        number
        for number, one in enumerate(kernels)
        if re.search(r"decode_kernel|splitkv_mla_kernel|stage1", one[2])
    ]
    if len(decodes) < 3:
        return
    first, last = decodes[len(decodes) // 2 : len(decodes) // 2 + 2]
    for start, end, name in kernels[first - 1 : last + 1]:
        origin = kernels[first][0]
        print(f"   {start - origin:8.1f} to {end - origin:8.1f} us  {name[:90]}", flush=True)
