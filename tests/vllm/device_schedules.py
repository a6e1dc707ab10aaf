"""Random serving schedules on kbmla: arrivals, aborts, preemptions by a small cache."""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections import Counter
from typing import Any

from device_engine import (
    DECODE_GRAPHS,
    KBMLA,
    MIXED,
    count_plans,
    cycle,
    engine,
    metric,
    model,
    planned,
    print_table,
    speculative_graphs,
)
from tiny_model import FIRST_TOKEN, VOCABULARY


def schedules(arguments: argparse.Namespace) -> bool:
    count_plans()
    rows = []
    shares = ((0.7, DECODE_GRAPHS, "graphs"), (0.3, speculative_graphs(), "n-gram"))
    for share, options, name in shares:
        planned.clear()
        wanted = round(arguments.number * share)
        done, error = 0, ""
        counts: Counter[str] = Counter()
        began = time.time()
        try:
            # 100 pages are 6,400 tokens: less than the requests of most schedules ask for.
            small = {"num_gpu_blocks_override": 100, "max_model_len": 4096}
            with engine(model(16), KBMLA, "fp8", **options, **small, **MIXED) as llm:
                for seed in range(wanted):
                    schedule(llm, random.Random(seed), counts)
                    done += 1
                counts["preempted"] = int(metric(llm, "vllm:num_preemptions"))
        except Exception as caught:
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"[:80]
        fine = done == wanted and not counts["not finite"] and counts["preempted"] > 0
        rows.append(
            [name, f"{done}/{wanted}", counts["finished"], counts["aborted"], counts["preempted"],
             counts["steps"], counts["not finite"], dict(planned), f"{time.time() - began:.0f}",
             "ok" if fine else "FAIL", error]
        )  # fmt: skip
    head = ["engine", "schedules", "finished", "aborted", "preempted", "steps", "not finite",
            "planned", "s", "", "note"]  # fmt: skip
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
                counts["not finite"] += sum(not abs(value) < float("inf") for value in values)
        step += 1
        counts["steps"] += 1
        if step > 20000:
            raise RuntimeError(f"schedule: expected an end within 20000 steps, got {step}")
