"""Log-probabilities of vLLM on kbmla beside those of a BF16 cache, on one GPU and on two."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from device_engine import (
    DECODE_GRAPHS,
    EAGER,
    FULL_GRAPHS,
    HERE,
    KBMLA,
    LENGTHS,
    MIXED,
    TOKENS,
    count_plans,
    engine,
    metric,
    model,
    planned,
    print_table,
    prompts,
    save,
    speculative_graphs,
)
from tiny_model import FIRST_TOKEN, VOCABULARY


def generate(llm: Any, loop: bool) -> list[dict[str, list]]:
    """Tokens and their log-probabilities per prompt: forced random tokens, or greedy ones."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(6)
    wanted, parameters = [], []
    for _ in LENGTHS:
        forced = torch.randint(FIRST_TOKEN, VOCABULARY, (TOKENS,), generator=generator).tolist()
        wanted.append(forced)
        extra = {} if loop else {"extra_args": {"forced": forced}}
        parameters.append(
            SamplingParams(
                temperature=0,
                max_tokens=TOKENS,
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
                **extra,
            )
        )
    given = [{"prompt_token_ids": tokens} for tokens in prompts(loop)]
    results = []
    for output, forced in zip(llm.generate(given, parameters, use_tqdm=False), wanted, strict=True):
        tokens = list(output.outputs[0].token_ids)
        if not loop and tokens != forced:
            raise RuntimeError(f"tokens: expected the forced {forced[:8]}..., got {tokens[:8]}...")
        chosen = zip(output.outputs[0].logprobs, tokens, strict=True)
        results.append(
            {"tokens": tokens, "lp": [float(one[token].logprob) for one, token in chosen]}
        )
    return results


def one_run(heads: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Loads one engine and lets it generate what `spec` names, "forced" and "loop" in its order."""
    options = dict(spec["options"])
    if "speculative_config" not in options:  # which takes no logits processors
        options["logits_processors"] = ["forced_tokens:ForcedTokens"]
    planned.clear()
    run: dict[str, Any] = {}
    with engine(model(heads), spec["backend"], spec["cache"], **options) as llm:
        for number, kind in enumerate(spec["kinds"]):
            run[kind if kind not in run else f"{kind}{number}"] = generate(llm, kind == "loop")
        if "speculative_config" in options:
            run["drafts"] = metric(llm, "vllm:spec_decode_num_draft_tokens")
            run["accepted"] = metric(llm, "vllm:spec_decode_num_accepted_tokens")
        run["hits"] = metric(llm, "vllm:prefix_cache_hits")
    run["planned"] = dict(planned)
    return run


def difference(run: list[dict], other: list[dict]) -> tuple[float, float, int, bool]:
    """(mean, largest |difference| of log-probabilities up to the first differing token of a prompt,
    tokens compared, whether all of `run` are finite)."""
    deltas = []
    for mine, theirs in zip(run, other, strict=True):
        pairs = list(zip(mine["tokens"], theirs["tokens"], strict=True))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        deltas += [abs(a - b) for a, b in zip(mine["lp"][:same], theirs["lp"][:same], strict=True)]
    finite = all(abs(value) < float("inf") for one in run for value in one["lp"])
    if not deltas:
        return float("nan"), float("nan"), 0, finite
    return sum(deltas) / len(deltas), max(deltas), len(deltas), finite


def spec(name: str, backend: str, cache: str, kinds: list[str], **options: Any) -> dict[str, Any]:
    return {"name": name, "backend": backend, "cache": cache, "kinds": kinds, "options": options}


BOTH = ["forced", "loop"]
REFERENCE = spec("FLASHMLA bf16", "FLASHMLA", "auto", BOTH, **EAGER)
PEER = spec("FLASHMLA fp8", "FLASHMLA", "fp8", BOTH, **EAGER)
EAGER_RUN = spec("kbmla eager", KBMLA, "fp8", BOTH, **EAGER)
# Twice the same prompts: the second time from cached prefixes. Prefill reads those and earlier
# chunks from the FP8 cache, which moves results whatever the decode is: hence the peer's own move.
TWICE = [*BOTH, *BOTH]
MIXED_PEER = spec(
    "FLASHMLA fp8 chunks, prefixes", "FLASHMLA", "fp8", TWICE, **DECODE_GRAPHS, **MIXED
)
MIXED_RUN = spec("kbmla chunks, prefixes", KBMLA, "fp8", TWICE, **DECODE_GRAPHS, **MIXED)


def compare(heads: int, runs: dict[str, dict[str, Any]]) -> tuple[list[list[Any]], bool]:
    """The table of one head count, and whether every line holds: kbmla at most as far from the BF16
    cache as FLASHMLA, its modes no further from eager than FP8 itself moves FLASHMLA."""
    rows, good = [], True
    moved: dict[str, float] = {}
    reference, noise, eager = runs.get(REFERENCE["name"]), {}, runs.get(EAGER_RUN["name"])
    for name, run in runs.items():
        if "error" in run:
            rows.append([heads, name, "-", "-", "-", "-", "-", "FAIL", run["error"][:60]])
            good = False
            continue
        for kind in [key for key in run if key.startswith(("forced", "loop"))]:
            base = kind.rstrip("0123456789")
            if reference is None or base not in reference:
                continue
            mean, most, count, finite = difference(run[kind], reference[base])
            note, fine = "", finite
            from_eager = ""
            if name == PEER["name"]:
                noise[base] = mean
            if name == MIXED_PEER["name"] and base in runs[PEER["name"]]:
                moved[kind] = difference(run[kind], runs[PEER["name"]][base])[0]
                from_eager = f"{moved[kind]:.5f}"
            if name.startswith("kbmla"):
                if name == EAGER_RUN["name"] and base == "forced":
                    fine &= mean <= noise.get(base, 0.0)
                if eager is not None and base in eager and name != EAGER_RUN["name"]:
                    apart, _, count, _ = difference(run[kind], eager[base])
                    from_eager = f"{apart:.5f}"
                    allowed = noise.get(base, 0.0)
                    if name == MIXED_RUN["name"]:
                        allowed = max(allowed, moved.get(kind, 0.0))
                    fine &= apart <= allowed
                note = f"planned {run['planned']}" if run["planned"] else ""
                if "drafts" in run:
                    note += f" drafts {run['drafts']:.0f} accepted {run['accepted']:.0f}"
                if run.get("hits"):
                    note += f" prefix hits {run['hits']:.0f}"
            good &= fine or not name.startswith("kbmla")
            rows.append(
                [heads, name, kind, f"{mean:.5f}", f"{most:.4f}", from_eager, count,
                 "ok" if fine else "FAIL", note]
            )  # fmt: skip
    return rows, good


HEAD = ["heads", "run", "tokens", "mean |dlp| bf16", "max", "to eager", "compared", "", "note"]


def attempt(heads: int, one: dict[str, Any]) -> dict[str, Any]:
    """`one_run` in this process, which saves imports; if it fails, as an engine may after another
    one, in a process of its own."""
    try:
        return one_run(heads, one)
    except Exception:
        traceback.print_exc()
    return child(heads, one)


def accuracy(arguments: argparse.Namespace) -> bool:
    count_plans()
    rows, good = [], True
    for heads in arguments.heads:
        specs = [
            REFERENCE,
            PEER,
            EAGER_RUN,
            spec("kbmla decode graphs", KBMLA, "fp8", BOTH, **DECODE_GRAPHS),
            spec("kbmla full graphs", KBMLA, "fp8", BOTH, **FULL_GRAPHS),
            MIXED_PEER,
            MIXED_RUN,
            spec("kbmla n-gram", KBMLA, "fp8", ["loop"], **speculative_graphs()),
        ]
        runs = {one["name"]: attempt(heads, one) for one in specs}
        save(f"accuracy{heads}", runs)
        table, fine = compare(heads, runs)
        rows, good = rows + table, good and fine
    print_table(HEAD, rows)
    return good


def dcp(arguments: argparse.Namespace) -> bool:
    count_plans()
    rows, good = [], True
    for heads in arguments.heads:
        specs = [spec("kbmla TP 2", KBMLA, "fp8", BOTH, **DECODE_GRAPHS, tensor_parallel_size=2)]
        for interleave in (1, 64):
            ranks = {
                "tensor_parallel_size": 2,
                "decode_context_parallel_size": 2,
                "cp_kv_cache_interleave_size": interleave,
            }
            name = f"kbmla DCP 2, interleave {interleave}"
            specs.append(spec(name, KBMLA, "fp8", BOTH, **DECODE_GRAPHS, **ranks))
        specs.append(
            spec(f"{name}, n-gram", KBMLA, "fp8", ["loop"], **speculative_graphs(), **ranks)
        )
        # On two GPUs each engine gets a process of its own, whose workers see no other CUDA user.
        two = {one["name"]: child(heads, one) for one in specs}
        runs = {one["name"]: attempt(heads, one) for one in (REFERENCE, PEER, EAGER_RUN)} | two
        save(f"dcp{heads}", runs)
        table, fine = compare(heads, runs)
        rows, good = rows + table, good and fine
    print_table(HEAD, rows)
    return good


CHILD_SECONDS = 150


def child(heads: int, one: dict[str, Any]) -> dict[str, Any]:
    """`one_run` in a process of its own."""
    model(heads)
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [
            sys.executable,
            str(HERE / "device.py"),
            "one",
            str(heads),
            json.dumps(one),
            answer.name,
        ]
        try:
            done = subprocess.run(command, timeout=CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            return {"error": f"no end within {CHILD_SECONDS} s"}
        if done.returncode:
            return {"error": f"exit status {done.returncode}"}
        return json.load(answer)


def one(arguments: argparse.Namespace) -> bool:
    count_plans()
    run = one_run(arguments.head_count, json.loads(arguments.spec))
    Path(arguments.answer).write_text(json.dumps(run))
    return True
