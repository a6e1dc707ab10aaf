# SPDX-License-Identifier: Apache-2.0
"""Random serving schedules on kbmla: arrivals, aborts, preemptions by a small cache."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from functools import partial
from typing import Any

from device_engine import (
    DECODE_GRAPHS,
    KBMLA,
    MIXED,
    MTP,
    SIDE_BY_SIDE,
    count_plans,
    cycle,
    engine,
    has_mtp,
    metric,
    model,
    planned,
    print_table,
    save,
    speculative_graphs,
    use_runner,
)
from device_jobs import preload, run_jobs
from tiny_model import FIRST_TOKEN, VOCABULARY

SECONDS = 400
# 100 pages are 6,400 tokens: less than the requests of most schedules ask for.
SMALL = {"num_gpu_blocks_override": 100, "max_model_len": 4096}


def run_seeds(options: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """One engine that serves the schedules of `seeds` one after the other."""
    counts: Counter[str] = Counter()
    path = model(16, drafter=has_mtp(options))
    with engine(path, KBMLA, "fp8", **SIDE_BY_SIDE, **options, **SMALL, **MIXED) as llm:
        for seed in seeds:
            schedule(llm, random.Random(seed), counts)
            counts["schedules"] += 1
            print(f"-- schedule {seed}: {dict(counts)}", flush=True)
        counts["preempted"] = int(metric(llm, "vllm:num_preemptions"))
    return {"counts": counts, "planned": dict(planned)}


def schedules(arguments: argparse.Namespace) -> bool:
    use_runner(arguments.runner)
    preload()
    count_plans()
    work: dict[str, Any] = {
        "model of 16 heads": partial(model, 16),
        "model of 16 heads with its drafter": partial(model, 16, drafter=True),
    }
    run_jobs(work, 2, SECONDS)
    shares = {"graphs": (0.6, DECODE_GRAPHS), "MTP": (0.4, speculative_graphs(MTP))}
    if arguments.runner == 1:
        shares["MTP"] = (0.2, speculative_graphs(MTP))
        shares["n-gram"] = (0.2, speculative_graphs())
    work = {}
    for name, (share, options) in shares.items():
        seeds = list(range(round(arguments.number * share)))
        engines = max(1, round(arguments.jobs * share))
        for number in range(engines):
            work[f"schedules, {name} {number}"] = partial(
                run_seeds, options, seeds[number::engines]
            )
    results = run_jobs(work, arguments.jobs, SECONDS)
    save("schedules", results)
    rows = []
    for name, (share, _) in shares.items():
        wanted = round(arguments.number * share)
        parts = [one for key, one in results.items() if name in key]
        errors = [one["error"] for one in parts if "error" in one]
        counts, plans = Counter(), Counter()
        for part in parts:
            counts.update(part.get("counts", {}))
            plans.update(part.get("planned", {}))
        ended = counts["finished"] + counts["aborted"] == counts["requests"]
        fine = counts["schedules"] == wanted and not counts["not finite"] and ended
        fine &= counts["preempted"] > 0 and counts["aborted"] > 0 and not errors
        verified = any(int(query_len) > 1 for query_len in plans)
        fine &= verified == (name != "graphs")
        rows.append(
            [name, f"{counts['schedules']}/{wanted}", counts["requests"], counts["finished"],
             counts["aborted"], counts["preempted"], counts["steps"], counts["values"],
             counts["not finite"], dict(plans), "ok" if fine else "FAIL", "; ".join(errors)[:120]]
        )  # fmt: skip
    head = ["engine", "schedules", "requests", "finished", "aborted", "preempted", "steps",
            "log-probabilities", "not finite", "planned", "", "note"]  # fmt: skip
    print_table(head, rows)
    return all(row[-2] == "ok" for row in rows)


def schedule(llm: Any, rng: random.Random, counts: Counter[str]) -> None:
    """One schedule: requests come at random steps, some are aborted, the rest run to their end."""
    from vllm import SamplingParams

    serving = llm.llm_engine
    waiting = []
    for _ in range(rng.randint(1, 24)):
        length = round(3 * 1000 ** rng.random())  # 3 to 3,000 tokens, each magnitude as often
        tokens = [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)]
        tail = min(length, 18)
        tokens[length - tail :] = cycle(tokens[0], tail)
        waiting.append((rng.randint(0, 30), tokens, rng.randint(1, 200), rng.random() < 0.2))
    waiting.sort(key=lambda one: one[0], reverse=True)
    aborts: dict[int, list[str]] = {}
    ended: set[str] = set()
    step = 0
    while waiting or serving.has_unfinished_requests():
        while waiting and (waiting[-1][0] <= step):
            _, tokens, length, leaves = waiting.pop()
            counts["requests"] += 1
            name = str(counts["requests"])
            settings = SamplingParams(
                temperature=0, max_tokens=length, logprobs=0, detokenize=False, ignore_eos=True
            )
            serving.add_request(name, {"prompt_token_ids": tokens}, settings)
            if leaves:
                aborts.setdefault(step + rng.randint(1, 20), []).append(name)
        if names := [name for name in aborts.pop(step, []) if name not in ended]:
            serving.abort_request(names)
            ended.update(names)
            counts["aborted"] += len(names)
        for output in serving.step():
            if output.finished and output.request_id not in ended:
                ended.add(output.request_id)
                counts["finished"] += 1
                chosen = output.outputs[0].logprobs
                values = [next(iter(one.values())).logprob for one in chosen]
                counts["values"] += len(values)
                counts["not finite"] += sum(not abs(value) < float("inf") for value in values)
        step += 1
        counts["steps"] += 1
        if step > 20000:
            raise RuntimeError(f"schedule: expected an end within 20000 steps, got {step}")
