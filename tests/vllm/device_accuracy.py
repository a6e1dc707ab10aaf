# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of vLLM on kbmla beside those of a BF16 cache, on one GPU and on two."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any

import torch
from device_engine import (
    ACROSS_LAYERS,
    DECODE_GRAPHS,
    EAGER,
    FULL_GRAPHS,
    KBMLA,
    LENGTHS,
    MIXED,
    MTP,
    NGRAM,
    SIDE_BY_SIDE,
    TOKENS,
    count_plans,
    engine,
    has_mtp,
    metric,
    model,
    planned,
    print_table,
    prompts,
    save,
    speculative_graphs,
    use_portable_kernel,
    use_runner,
)
from device_jobs import preload, run_jobs
from tiny_model import FIRST_TOKEN, VOCABULARY


def generate(llm: Any, kind: str, longest: int | None = None) -> list[dict[str, Any]]:
    """Tokens and their log-probabilities per prompt: greedy ones of kind "loop", forced random ones
    of kind "forced" and, other prompts and tokens, of "draw 1", "draw 2", ... Prompts of more than
    `longest` tokens are left out: they have no tokens."""
    from vllm import SamplingParams

    loop = kind == "loop"
    draw = int(kind.removeprefix("draw ")) if kind.startswith("draw ") else 0
    generator = torch.Generator().manual_seed(6 + 1000 * draw)
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
    chosen = [longest is None or length <= longest for length in LENGTHS]
    given = [{"prompt_token_ids": tokens} for tokens in compress(prompts(loop, draw), chosen)]
    outputs = iter(llm.generate(given, list(compress(parameters, chosen)), use_tqdm=False))
    results: list[dict[str, Any]] = []
    for forced, is_chosen in zip(wanted, chosen, strict=True):
        if not is_chosen:
            results.append({"tokens": [], "lp": [], "cached": 0})
            continue
        output = next(outputs)
        tokens = list(output.outputs[0].token_ids)
        if not loop and tokens != forced:
            raise RuntimeError(f"tokens: expected the forced {forced[:8]}..., got {tokens[:8]}...")
        values = zip(output.outputs[0].logprobs, tokens, strict=True)
        results.append(
            {
                "tokens": tokens,
                "lp": [float(one[token].logprob) for one, token in values],
                # vLLM's own counter of hits misses those that it hears of between two generations.
                "cached": output.num_cached_tokens,
            }
        )
    return results


def one_run(model_path: Callable[..., str], spec: dict[str, Any]) -> dict[str, Any]:
    """Loads one engine and lets it generate the kinds that `spec` names, in its order."""
    options = SIDE_BY_SIDE | spec["options"]
    if "forced" in spec["kinds"]:
        options["logits_processors"] = ["forced_tokens:ForcedTokens"]
    use_runner(spec["runner"])
    if spec["portable"]:
        use_portable_kernel()
    planned.clear()
    run: dict[str, Any] = {}
    path = model_path(drafter=has_mtp(options))
    with engine(path, spec["backend"], spec["cache"], **options) as llm:
        config = llm.llm_engine.vllm_config
        run["runner"] = 1 + config.use_v2_model_runner
        run["async"] = config.scheduler_config.async_scheduling
        for kind in spec["kinds"]:
            run[kind if kind not in run else f"{kind} again"] = generate(llm, kind, spec["longest"])
        if "speculative_config" in options:
            run["drafts"] = metric(llm, "vllm:spec_decode_num_draft_tokens")
            run["accepted"] = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    run["planned"] = dict(planned)
    return run


def excess(run: list[dict], peer: list[dict], reference: list[dict]) -> tuple[float, float]:
    """(mean, its standard error) of how much further from `reference` the forced tokens of `run`
    are than those of `peer`. A prompt counts as one observation: its tokens share a cache."""
    prompts = []
    for mine, theirs, truth in zip(run, peer, reference, strict=True):
        values = zip(mine["lp"], theirs["lp"], truth["lp"], strict=True)
        prompts.append(statistics.mean(abs(a - t) - abs(b - t) for a, b, t in values))
    return statistics.mean(prompts), statistics.stdev(prompts) / len(prompts) ** 0.5


def forced_prompts(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The forced prompts of a run, those of all draws."""
    kinds = ["forced", *(kind for kind in run if kind.startswith("draw "))]
    return [prompt for kind in kinds for prompt in run[kind]]


def difference(run: list[dict], other: list[dict]) -> tuple[float, float, int, bool]:
    """(mean, largest |difference| of log-probabilities up to the first differing token of a prompt,
    tokens compared, whether all of `run` are finite)."""
    deltas = []
    for mine, theirs in zip(run, other, strict=True):
        if not mine["tokens"]:
            continue
        pairs = list(zip(mine["tokens"], theirs["tokens"], strict=True))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        deltas += [abs(a - b) for a, b in zip(mine["lp"][:same], theirs["lp"][:same], strict=True)]
    finite = all(abs(value) < float("inf") for one in run for value in one["lp"])
    if not deltas:
        return float("nan"), float("nan"), 0, finite
    return sum(deltas) / len(deltas), max(deltas), len(deltas), finite


def spec(
    name: str,
    backend: str,
    cache: str,
    kinds: list[str],
    *,
    runner: int = 1,
    portable: bool = False,
    longest: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A run. runner: vLLM's first or second model runner; portable: on the portable kernel;
    longest: leaves out prompts of more tokens; options: the engine's."""
    return {
        "name": name if runner == 1 else f"{name}, runner {runner}",
        "backend": backend,
        "cache": cache,
        "kinds": kinds,
        "runner": runner,
        "portable": portable,
        "longest": longest,
        "options": options,
    }


BOTH = ["forced", "loop"]
REFERENCE = spec("FLASHMLA bf16", "FLASHMLA", "auto", BOTH, **EAGER)
PEER = spec("FLASHMLA fp8", "FLASHMLA", "fp8", BOTH, **EAGER)
EAGER_RUN = spec("kbmla eager", KBMLA, "fp8", BOTH, **EAGER)
# Twice the same prompts: the second time from cached prefixes. Prefill reads those and earlier
# chunks from the FP8 cache, which moves results whatever the decode is: hence the peer's own move.
TWICE = [*BOTH, *BOTH]
PREFIXES = "chunks, prefixes"
CHUNKS = {**DECODE_GRAPHS, **MIXED}
MIXED_PEERS = {
    one["name"]: one
    for one in (
        spec(f"FLASHMLA fp8 {PREFIXES}", "FLASHMLA", "fp8", TWICE, **CHUNKS),
        # Here it moves far: vLLM 0.26's prefill takes the requests with a context for the first
        # ones, as its first runner orders them, and its second does not.
        spec(f"FLASHMLA fp8 {PREFIXES}", "FLASHMLA", "fp8", ["loop", "loop"], runner=2, **CHUNKS),
    )
}
MIXED_RUN = spec(f"kbmla {PREFIXES}", KBMLA, "fp8", TWICE, **CHUNKS)
# The drafter's layer decodes on a builder of its own, several times between the model's steps.
MTP_RUNS = [
    spec(f"kbmla MTP{mode}", KBMLA, "fp8", ["loop"], runner=runner, **options)
    for runner in (1, 2)
    for mode, options in (
        ("", speculative_graphs(MTP)),
        (", eager", {**EAGER, **MTP}),
        (", full graphs", {**FULL_GRAPHS, **MTP}),
    )
]
# vLLM's second model runner takes no logits processors, hence no forced tokens.
RUNNER_2 = [
    spec("kbmla eager", KBMLA, "fp8", ["loop"], runner=2, **EAGER),
    spec("kbmla decode graphs", KBMLA, "fp8", ["loop"], runner=2, **DECODE_GRAPHS),
    spec("kbmla full graphs", KBMLA, "fp8", ["loop"], runner=2, **FULL_GRAPHS),
    spec(f"kbmla {PREFIXES}", KBMLA, "fp8", ["loop", "loop"], runner=2, **CHUNKS),
]


def compare(heads: int, runs: dict[str, dict[str, Any]]) -> tuple[list[list[Any]], bool]:
    """The table of one head count, and whether every line holds: kbmla not further from the BF16
    cache than FLASHMLA by more than two standard errors, its modes no further from eager than FP8
    itself moves FLASHMLA."""
    rows, good = [], True
    moved: dict[tuple[int, str], float] = {}
    reference, noise, eager = runs.get(REFERENCE["name"]), {}, runs.get(EAGER_RUN["name"])
    for name, run in runs.items():
        if "error" in run:
            rows.append([heads, name, "-", "-", "-", "-", "-", "FAIL", run["error"][:60]])
            good = False
            continue
        for kind in [key for key in run if key.startswith(("forced", "loop"))]:
            base = kind.removesuffix(" again")
            if reference is None or base not in reference:
                continue
            mean, most, count, finite = difference(run[kind], reference[base])
            note, peer_note, fine = "", "", finite
            from_eager = ""
            if name == PEER["name"]:
                noise[base] = mean
            if name in MIXED_PEERS and base in runs[PEER["name"]]:
                apart = difference(run[kind], runs[PEER["name"]][base])[0]
                moved[run["runner"], kind] = apart
                from_eager = f"{apart:.5f}"
            if name.startswith("kbmla"):
                if name == EAGER_RUN["name"] and base == "forced" and PEER["name"] in runs:
                    # "At most FLASHMLA's" as a test of it: the rounding of cache and query, which
                    # both share, makes most of the distance, and that of P differs from token to
                    # token, so equal backends exceed each other in half of all draws.
                    more, error = excess(
                        *(forced_prompts(one) for one in (run, runs[PEER["name"]], reference))
                    )
                    fine &= more <= 2 * error
                    count_of = len(forced_prompts(run))
                    peer_note = f"{more:+.5f} +- {error:.5f} of FLASHMLA, {count_of} prompts; "
                if eager is not None and base in eager and name != EAGER_RUN["name"]:
                    apart, _, count, _ = difference(run[kind], eager[base])
                    from_eager = f"{apart:.5f}"
                    allowed = noise.get(base, 0.0)
                    if PREFIXES in name:
                        allowed = max(allowed, moved.get((run["runner"], kind), 0.0))
                    fine &= apart <= allowed
                note = peer_note + (f"planned {run['planned']}" if run["planned"] else "")
                if "drafts" in run:
                    fine &= run["drafts"] > 0 and run["accepted"] > 0
                    note += f" drafts {run['drafts']:.0f} accepted {run['accepted']:.0f}"
                note += f" runner {run['runner']}" + (" async" if run["async"] else "")
                if PREFIXES in name:
                    cached = sum(one["cached"] for one in run[kind])
                    fine &= cached > 0 or kind in BOTH
                    note += f" prefix tokens {cached}"
            good &= fine or not name.startswith("kbmla")
            rows.append(
                [heads, name, kind, f"{mean:.5f}", f"{most:.4f}", from_eager, count,
                 "ok" if fine else "FAIL", note]
            )  # fmt: skip
    return rows, good


HEAD = ["heads", "run", "tokens", "mean |dlp| bf16", "max", "to eager", "compared", "", "note"]


JOB_SECONDS = 240


def compared(arguments: argparse.Namespace, specs: list[dict[str, Any]], title: str) -> bool:
    """Runs `specs` with every head count, prints each head count's table as its last run ends and
    saves its runs."""
    heads, at_once = arguments.heads, arguments.jobs
    base = [REFERENCE["name"], PEER["name"], EAGER_RUN["name"], *MIXED_PEERS]
    draws = [f"draw {number}" for number in range(1, arguments.draws)]
    drawn = [one["name"] for one in (REFERENCE, PEER, EAGER_RUN)]
    specs = [
        one | {"kinds": one["kinds"] + draws} if one["name"] in drawn else one for one in specs
    ]
    specs = [one for one in specs if one["name"] in base or re.search(arguments.only, one["name"])]
    jobs = {f"{count} heads, {one['name']}": (count, one) for one in specs for count in heads}
    runs: dict[int, dict[str, dict[str, Any]]] = {count: {} for count in heads}
    rows, good = {}, {}

    def done(name: str, run: dict[str, Any]) -> None:
        count, one = jobs[name]
        runs[count][one["name"]] = run
        if len(runs[count]) == len(specs):
            runs[count] = {one["name"]: runs[count][one["name"]] for one in specs}
            save(f"{title}{count}", runs[count])
            rows[count], good[count] = compare(count, runs[count])
            print_table(HEAD, rows[count])

    dimensions = {"nope": arguments.nope, "value": arguments.value}
    paths = {count: partial(model, count, **dimensions) for count in heads}
    models = {f"model of {count} heads": path for count, path in paths.items()}
    if any(has_mtp(one["options"]) for one in specs):
        models |= {
            f"{name} with its drafter": partial(path, drafter=True) for name, path in models.items()
        }
    run_jobs(models, at_once, JOB_SECONDS)
    work = {name: partial(one_run, paths[count], one) for name, (count, one) in jobs.items()}
    run_jobs(work, at_once, JOB_SECONDS, done)
    print_table(HEAD, [row for count in heads for row in rows[count]])
    return all(good.values())


def accuracy(arguments: argparse.Namespace) -> bool:
    preload()
    count_plans()
    specs = [
        REFERENCE,
        PEER,
        EAGER_RUN,
        spec("kbmla decode graphs", KBMLA, "fp8", BOTH, **DECODE_GRAPHS),
        spec("kbmla full graphs", KBMLA, "fp8", BOTH, **FULL_GRAPHS),
        *MIXED_PEERS.values(),
        MIXED_RUN,
        spec("kbmla n-gram", KBMLA, "fp8", ["loop"], **speculative_graphs()),
        spec("kbmla across layers", KBMLA, "fp8", BOTH, **DECODE_GRAPHS, **ACROSS_LAYERS),
        spec("kbmla portable kernel", KBMLA, "fp8", BOTH, portable=True, **DECODE_GRAPHS),
        *MTP_RUNS,
        *RUNNER_2,
    ]
    return compared(arguments, specs, "accuracy")


def dcp(arguments: argparse.Namespace) -> bool:
    preload()
    count_plans()
    specs = [spec("kbmla TP 2", KBMLA, "fp8", BOTH, **DECODE_GRAPHS, tensor_parallel_size=2)]
    for interleave in (1, 64):
        ranks = {
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
            "cp_kv_cache_interleave_size": interleave,
        }
        name = f"kbmla DCP 2, interleave {interleave}"
        specs.append(spec(name, KBMLA, "fp8", BOTH, **DECODE_GRAPHS, **ranks))
        # vLLM 0.26's own prefill fails an assertion (reorg_kvcache) where a request without drafts
        # has more context than one chunk and the chunk is no multiple of ranks * interleave: here
        # 65,536 / 9, 11 or 12 such requests, rounded down to pages.
        longest = 4000 if interleave > 1 else None
        for method, settings in (("n-gram", NGRAM), ("MTP", MTP)):
            drafts = {**speculative_graphs(settings), **ranks}
            specs.append(
                spec(f"{name}, {method}", KBMLA, "fp8", ["loop"], longest=longest, **drafts)
            )
        specs.append(spec(name, KBMLA, "fp8", ["loop"], runner=2, **DECODE_GRAPHS, **ranks))
    specs = [REFERENCE, PEER, EAGER_RUN, *specs]
    return compared(arguments, specs, "dcp")
