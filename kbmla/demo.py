# SPDX-License-Identifier: Apache-2.0
"""The demonstration behind `python -m kbmla demo`: a batch drawn from a public serving trace is
planned, decoded, timed and compared with float64; the plans are drawn as text."""

from __future__ import annotations

import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import picture, reference, workloads
from ._lib import build_info
from .balanced import BalancedMla, supported
from .core import P_SCALE, backend_of

__all__ = [
    "LSE_BOUND",
    "OUT_BOUND",
    "RULE_MARGIN",
    "SOFTMAX_SCALE",
    "Progress",
    "Result",
    "Step",
    "check",
    "demo",
    "measure",
    "pick_device",
]

OUT_BOUND = 0.02  # relative Frobenius error on Gaussian data
LSE_BOUND = 2e-3  # base 2
# Rounding probabilities to E4M3 costs 0.008 to 0.024 on Gaussian data, most on short requests.
# Where that rule alone exceeds OUT_BOUND, the bound is its own error with this margin.
RULE_MARGIN = 1.05
SOFTMAX_SCALE = 192**-0.5  # of DeepSeek and Kimi: their query-key width before absorption
PAGE_SIZE = 64
CARD_CLUSTERS = 132  # SMs of an H100 SXM or H200


class Progress:
    """A bar on stderr while steps run, if stderr is a terminal: `with Progress(n) as bar`."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.shown = sys.stderr.isatty()

    def step(self, label: str) -> None:
        """Starts the next step."""
        if self.shown:
            filled = 24 * self.done // max(self.steps, 1)
            bar = "#" * filled + "-" * (24 - filled)
            print(f"\r\x1b[K[{bar}] {label}", end="", file=sys.stderr, flush=True)
        self.done += 1

    def clear(self) -> None:
        """Takes the bar away, so that a line can be printed."""
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


class Step:
    """A decode step of one layer: a batch, its output tensors and the model that decodes it.

    Args:
        batch: query [B, q, heads, 576] and the rest.
        policy, clusters: as `BalancedMla`.

    Attributes:
        out, lse: the results, [B, q, heads, 512] bf16 and [B, q, heads] float32.
    """

    def __init__(
        self, batch: workloads.Batch, *, policy: str = "balanced", clusters: int | None = None
    ) -> None:
        self.batch = batch
        requests, self.q, heads, _ = batch.query.shape
        device = batch.query.device
        self.model = BalancedMla(heads, device, False, policy=policy, clusters=clusters)
        self.model.require(self.q, requests)
        shape = (requests, self.q, heads)
        self.out = torch.empty(*shape, 512, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(shape, dtype=torch.float32, device=device)
        self.scales = (SOFTMAX_SCALE, 1.0)
        self._key = self.model.key(self.q, requests)

    @property
    def clusters(self) -> int:
        """Width of the wave."""
        return self.model.cores[self._key].clusters

    @property
    def counts(self) -> list[int]:
        """Splits per request of the last plan."""
        counts: list[int] = self.model.plans[self._key][0][: self.out.shape[0]].tolist()
        return counts

    def plan(self) -> None:
        """Plans the step."""
        self.model.plan(self.q, self.batch.lengths)

    def decode(self) -> None:
        """Decodes with the last plan into `out` and `lse`."""
        batch = self.batch
        self.model.decode(
            batch.query,
            batch.cache,
            batch.block_table,
            batch.lengths,
            self.scales,
            self.out,
            self.lse,
        )


def pick_device(name: str) -> torch.device:
    """The device of a command line: "auto" is a GPU that the kernels run on, or the CPU.

    Raises:
        ValueError: not a device.
        RuntimeError: a CUDA device that torch does not see.
    """
    if name == "auto":
        usable = torch.cuda.is_available() and supported(64, 1, torch.device("cuda"))
        return torch.device("cuda" if usable else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: expected auto, cpu or cuda[:N], got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device {name}: torch sees no usable CUDA device")
    return device


def measure(
    call: Callable[[], object], device: torch.device, *, repeats: int = 20, seconds: float = 2.0
) -> list[float]:
    """Seconds of up to `repeats` (>= 1) calls after one to warm up; stops early after `seconds`.

    On a GPU the call is captured in a CUDA graph and replays are timed by events, so host time is
    not counted; data that fits in the L2 cache stays there.
    """
    call()
    times: list[float] = []
    begin = time.perf_counter()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            graph.replay()
            while len(times) < repeats and (not times or time.perf_counter() - begin < seconds):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3)
        return times
    while len(times) < repeats and (not times or time.perf_counter() - begin < seconds):
        start_time = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_time)
    return times


@dataclass(frozen=True)
class Result:
    """Distance of a decode from float64.

    Attributes:
        out_error: ||out - ref|| / ||ref||, over all rows.
        rule_error: the same of `reference.e4m3_model`, what the rule for P costs by itself.
        lse_error: largest difference of the base-2 lse.
        same_empty: whether exactly the rows that see no key have lse -inf and out 0.
    """

    out_error: float
    rule_error: float
    lse_error: float
    same_empty: bool

    @property
    def within_bounds(self) -> bool:
        """Whether the promised bounds hold; a NaN does not."""
        bound = max(OUT_BOUND, RULE_MARGIN * self.rule_error)
        return self.same_empty and self.out_error <= bound and self.lse_error <= LSE_BOUND


def _error(out: Tensor, ref: Tensor) -> float:
    """Relative Frobenius error; absolute if the reference is zero."""
    norm = float(ref.norm())
    return float((out.double() - ref).norm()) / (norm or 1.0)


def check(
    out: Tensor, lse: Tensor, ref_out: Tensor, ref_lse: Tensor, rule_out: Tensor | None = None
) -> Result:
    """Compares out [..., 512] and lse [...] with the float64 result.

    `rule_out` is the output of `reference.e4m3_model` on the same inputs; None counts as exact.
    """
    empty = ref_lse.isneginf()
    lse_difference = (lse.double() - ref_lse)[~empty].abs()
    return Result(
        out_error=_error(out, ref_out),
        rule_error=0.0 if rule_out is None else _error(rule_out, ref_out),
        lse_error=float(lse_difference.max()) if lse_difference.numel() else 0.0,
        same_empty=bool((lse.isneginf() == empty).all() and (out[empty] == 0).all()),
    )


def _pair(lengths: Sequence[int], heads: int, q: int, clusters: int) -> str:
    plans = (
        picture.make_plan(lengths, heads=heads, q=q, clusters=clusters, policy=policy)
        for policy in ("balanced", "equal")
    )
    return picture.beside(*plans)


def demo(
    trace: str = "mooncake-conversation",
    *,
    requests: int = 8,
    seed: int = 11,
    longest: int = 32768,
    device: str = "auto",
    shapes: Iterable[tuple[int, int]] = ((64, 1), (64, 4), (12, 1), (12, 4)),
) -> bool:
    """Prints the demonstration; returns whether every result is within the promised bounds.

    Args:
        trace: a name of `workloads.trace_names`.
        requests: drawn from it, >= 1.
        seed: of lengths, data and page order.
        longest: longer requests are cut to this many tokens, >= 1.
        device: as `pick_device`.
        shapes: (heads, q) pairs to decode.

    Raises:
        ValueError, NotImplementedError, RuntimeError: an argument that does not fit.
    """
    if requests < 1 or longest < 1:
        raise ValueError(f"requests, longest: expected >= 1, got {requests}, {longest}")
    where = pick_device(device)
    shapes = list(shapes)
    drawn = workloads.draw(trace, requests, seed)
    lengths = [min(n, longest) for n in drawn]
    cut = sum(n > longest for n in drawn)

    info = build_info()
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"{info['cpu isa']} CPU"
    print(f"kbmla {info['kbmla']} on {where} ({name}), torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} CPU threads")
    print(f"trace {trace}: {workloads.trace_source(trace)}")
    print(f"{requests} requests, {sum(lengths)} KV tokens, page size {PAGE_SIZE}, random order")
    if cut:
        print(f"{cut} of them cut to {longest} tokens")

    batch = workloads.paged_cache(
        lengths,
        PAGE_SIZE,
        device=where,
        seed=seed,
        q=max((q for _, q in shapes), default=1),
        heads=max((heads for heads, _ in shapes), default=1),
    )
    print("\nheads  q  plan us  decode ms   KV GB/s  out error  E4M3 alone  lse error  splits")
    good = True
    clusters = 1
    order = sorted(range(requests), key=lambda b: -lengths[b])
    with Progress(2 * len(shapes)) as bar:
        for heads, q in shapes:
            step = Step(replace(batch, query=batch.query[:, :q, :heads]))
            bar.step(f"decode, heads {heads}, q {q}")
            plan_time = statistics.median(measure(step.plan, where))
            decode_time = statistics.median(measure(step.decode, where))
            bar.step(f"float64, heads {heads}, q {q}")
            clusters, counts = step.clusters, step.counts
            query = step.batch.query
            inputs = (query, batch.cache, batch.block_table, batch.lengths, step.scales)
            truth = reference.attention(*inputs)
            rule, _ = reference.e4m3_model(
                *inputs,
                counts=torch.tensor(counts),
                p_scale=P_SCALE,
                step=reference.STEP_TOKENS[backend_of(batch.cache.device)],
            )
            result = check(step.out, step.lse, *truth, rule)
            good &= result.within_bounds
            bar.clear()
            print(
                f"{heads:>5} {q:>2} {plan_time * 1e6:>8.1f} {decode_time * 1e3:>10.3f} "
                f"{batch.kv_bytes / decode_time / 1e9:>9.2f} {result.out_error:>10.4f} "
                f"{result.rule_error:>11.4f} {result.lse_error:>10.1e}  "
                f"{' '.join(str(counts[b]) for b in order[:8])}{' ...' if requests > 8 else ''}"
                f"{'' if result.within_bounds else '  OUT OF BOUNDS'}",
                flush=True,
            )
    print("splits are of the longest requests first; lengths in that order:")
    print(
        textwrap.fill(
            " ".join(str(lengths[b]) for b in order),
            98,
            initial_indent="  ",
            subsequent_indent="  ",
        )
    )
    print("E4M3 alone: error of a float64 model that rounds nothing but the probabilities")
    print(
        f"bounds: out {OUT_BOUND} or {RULE_MARGIN} x E4M3 alone, lse {LSE_BOUND}: "
        f"{'kept' if good else 'BROKEN'}"
    )

    if shapes:
        heads, q = shapes[0]
        for title, width in (
            (f"this device's wave, heads {heads}, q {q}", clusters),
            (f"a card of {CARD_CLUSTERS} clusters", CARD_CLUSTERS),
        ):
            print(f"\n{title}\n{_pair(lengths, heads, q, width)}")
    return good
