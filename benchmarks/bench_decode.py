# SPDX-License-Identifier: Apache-2.0
"""Decode on a GPU against what its memory allows and against FlashMLA's FP8 kernel.

Per batch, heads and q: one decode step over several layers, each with pages of its own, together
400 MB or more, so that every layer finds a cold L2 cache. The step is a CUDA graph; its replays are
timed by events, the median counts, and the table shows microseconds per layer, decode and reduce.
Page size 64, pages in random order, Gaussian E4M3 data, the policies side by side.

    us/plan   one plan, from a graph of plans alone: the price of a step, whatever its layers
    floor     bytes of the KV cache (576 per token) at the read bandwidth measured in this run
    of floor  that over the time; of roof: likewise, with the larger of floor and the time of the
              FLOP at the FP8 matrix rate measured in this run, which bounds 96 rows and more
    TFLOP/s   2 * (576 + 512) per token and query row, masked ones included
    x         FlashMLA's time over ours: above 1 is faster than FlashMLA. "recorded" is the figure
              of peers_h200.json, "run" the kernel of --flashmla, timed in turn with ours
    error     ||out - float64|| / ||float64|| of the longest request that fits and the shortest

With --sustained nothing takes turns, and the mean of each alone counts; floor and roof remain those
of short runs.

Exit status: 0 done, 1 an output out of bounds, 2 a request that cannot be met, in one line on
stderr.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import timing
import torch
from bench_report import (
    Row,
    header,
    largest,
    line,
    mode,
    plot,
    pyplot,
    read_json,
    summary,
    write_csv,
    write_json,
)
from bench_shapes import (
    HEAD_DIM_QK,
    HEAD_DIM_V,
    PAGE,
    Shape,
    grid_batches,
    page_tables,
    peers,
    select,
)
from torch import Tensor

from kbmla import BalancedMla, build_info, reference, supported
from kbmla.core import POLICIES
from kbmla.demo import SOFTMAX_SCALE

PLANS_PER_GRAPH = 50
CHECKED_SCORES = 2**27  # rows x tokens of a request that is checked: 1 GB of float64


# ---------------------------------------------------------------- data


def gaussian(*shape: int, seed: int, device: torch.device | str = "cuda") -> Tensor:
    """N(0, 1) as float8_e4m3fn, drawn on the device a quarter of a GB at a time."""
    generator = torch.Generator(device).manual_seed(seed)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for part in out.view(-1).view(torch.uint8).split(2**26):
        values = torch.randn(part.shape, generator=generator, device=device)
        part.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))
    return out


@dataclass(frozen=True)
class Inputs:
    """One step: query [B, q, heads, 576] and cache [pages, 64, 576] e4m3, a block table [B,
    max_pages] int32 per layer, lengths [B] int32. All layers share the query and the output."""

    shape: Shape
    query: Tensor
    cache: Tensor
    tables: list[Tensor]
    lengths: Tensor


def make_inputs(shape: Shape, cache: Tensor) -> Inputs:
    """The inputs of `shape` with pages from `cache`."""
    device = cache.device
    return Inputs(
        shape,
        gaussian(len(shape.lengths), shape.q, shape.heads, HEAD_DIM_QK, seed=1, device=device),
        cache,
        list(page_tables(shape.lengths, shape.layers).to(device)),
        torch.tensor(shape.lengths, dtype=torch.int32, device=device),
    )


# ---------------------------------------------------------------- what is timed


@dataclass
class Timed:
    """Two graphs, one step's decodes and PLANS_PER_GRAPH plans, and the last layer's output.

    `keep` holds what the graphs have addresses of.
    """

    decode: torch.cuda.CUDAGraph
    plan: torch.cuda.CUDAGraph
    out: Tensor
    keep: tuple[object, ...]


def _repeated(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(PLANS_PER_GRAPH):
            call()

    return run


def kbmla_graphs(inputs: Inputs, policy: str, options: Options) -> Timed:
    """The graphs of kbmla with one policy."""
    shape, device = inputs.shape, inputs.query.device
    requests = len(shape.lengths)
    model = BalancedMla(
        shape.heads,
        device,
        False,
        policy=policy,
        partial_fp16=options.partial_fp16,
        backend=options.backend,
    )
    model.require(shape.q, requests)
    rows = (requests, shape.q, shape.heads)
    # NaN until written: an element that no kernel writes shows in the error.
    out = torch.full((*rows, HEAD_DIM_V), math.nan, dtype=torch.bfloat16, device=device)
    lse = torch.full(rows, math.nan, device=device)
    scales = (SOFTMAX_SCALE, 1.0)

    def plan() -> None:
        model.plan(shape.q, inputs.lengths)

    def decode() -> None:
        for table in inputs.tables:
            model.decode(inputs.query, inputs.cache, table, inputs.lengths, scales, out, lse)

    plan()
    graphs = timing.capture(decode), timing.capture(_repeated(plan))
    return Timed(*graphs, out, (model, lse, inputs))


class FlashMla:
    """FlashMLA's dense FP8 kernel for SM90, from the library of vLLM's wheel. RuntimeError when it
    does not load."""

    def __init__(self, path: str) -> None:
        try:
            torch.ops.load_library(path)
            ops = torch.ops._flashmla_extension_C
            self._metadata = ops.get_mla_decoding_metadata_dense_fp8
            self._forward = ops.fwd_kvcache_mla_fp8
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"--flashmla {path}: {str(error).splitlines()[0]}") from None

    def graphs(self, inputs: Inputs) -> Timed:
        """Its graphs of the same step."""
        shape = inputs.shape
        cache = inputs.cache.unsqueeze(2)  # [pages, 64, 1, 576]
        one = torch.ones(1, device=inputs.query.device)

        def plan() -> Any:
            return self._metadata(inputs.lengths, shape.q * shape.heads, 1)

        tiles, splits = plan()
        out: list[Tensor] = []

        def decode() -> None:
            out.clear()  # memory of the run before, not of the graph
            for table in inputs.tables:
                # The op allocates its output; in a capture that is the graph's own memory.
                out[:] = self._forward(
                    inputs.query, cache, HEAD_DIM_V, inputs.lengths, table, SOFTMAX_SCALE, True,
                    tiles, splits, one, one,
                )[:1]  # fmt: skip

        graphs = timing.capture(decode), timing.capture(_repeated(plan))
        return Timed(*graphs, out[0], (tiles, splits, one, cache, inputs))


# ---------------------------------------------------------------- checks


def checked_requests(shape: Shape) -> list[int]:
    """The requests compared with float64: the longest that fits, and the shortest."""
    order = sorted(range(len(shape.lengths)), key=lambda b: shape.lengths[b])
    rows = shape.heads * shape.q
    fit = [b for b in order if rows * shape.lengths[b] <= CHECKED_SCORES]
    return sorted({fit[0], fit[-1]}) if fit else []


def truth(inputs: Inputs) -> tuple[list[int], list[Tensor]]:
    """The checked requests and their exact outputs [1, q, heads, 512] of the last layer."""
    requests = checked_requests(inputs.shape)
    table = inputs.tables[-1]
    exact = [
        reference.attention(
            inputs.query[b : b + 1],
            inputs.cache,
            table[b : b + 1],
            inputs.lengths[b : b + 1],
            (SOFTMAX_SCALE, 1.0),
        )[0]
        for b in requests
    ]
    return requests, exact


def distance(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref||; NaN if either holds one."""
    ref = ref.double()
    return float((out.double() - ref).norm() / ref.norm())


def worst_error(out: Tensor, exact: tuple[list[int], list[Tensor]]) -> float | None:
    """Largest distance of the checked requests, NaN above all; None if none was checked."""
    found = [distance(out[b : b + 1], ref) for b, ref in zip(*exact, strict=True)]
    return largest(found)


# ---------------------------------------------------------------- one row


@dataclass(frozen=True)
class Options:
    """policies: the first is compared with FlashMLA; repeats: timed replays; seconds: limit of a
    shape's replays, which lowers the repeats of a slow one; check: compare outputs; partial_fp16:
    kbmla's unmerged results as FP16; backend: None takes the device's fastest; sustained: seconds
    of timing.sustained_times, instead of repeats and their limit."""

    policies: tuple[str, ...] = ("balanced", "equal")
    repeats: int = 20
    seconds: float = 4.0
    check: bool = True
    partial_fp16: bool = False
    backend: str | None = None
    sustained: float | None = None


def measure(
    shape: Shape,
    cache: Tensor,
    limits: timing.Ceilings,
    l2_bytes: int,
    options: Options,
    flashmla: FlashMla | None,
) -> Row:
    """Times one shape."""
    inputs = make_inputs(shape, cache)
    timed = {policy: kbmla_graphs(inputs, policy, options) for policy in options.policies}
    peer = flashmla.graphs(inputs) if flashmla else None
    everyone = [*timed.values(), *([peer] if peer else [])]
    steps = [one.decode.replay for one in everyone]
    if options.sustained:
        runs = timing.sustained_times(steps, options.sustained)
        repeats = min(map(len, runs))
    else:
        once = sum(times[0] for times in timing.event_times(steps, 1, warmup=1))
        repeats = timing.fitting_repeats(once, options.repeats, options.seconds)
        runs = timing.event_times(steps, repeats)
    plans = timing.event_times([one.plan.replay for one in everyone], min(repeats, 10))

    # At the limit clocks come and go: what counts is what is done in a time.
    average = timing.mean if options.sustained else timing.median
    per_layer = [average(times) / shape.layers for times in runs]
    per_plan = [timing.median(times) / PLANS_PER_GRAPH for times in plans]
    floor, roof = timing.roofline_us(shape.kv_bytes, shape.flops, limits)
    row = Row(
        batch=shape.batch,
        heads=shape.heads,
        q=shape.q,
        requests=len(shape.lengths),
        tokens=shape.tokens,
        layers=shape.layers,
        repeats=repeats,
        cold=shape.layers * shape.kv_bytes >= 3 * l2_bytes,
        us=dict(zip(timed, per_layer, strict=False)),
        plan_us=per_plan[0],
        floor_us=floor,
        roof_us=roof,
        recorded_us=None if options.sustained else peers().get((shape.batch, shape.heads, shape.q)),
        spread={
            name: (max(times) - min(times)) / timing.median(times)
            for name, times in zip([*timed, "flashmla"], runs, strict=False)
        },
    )
    if peer:
        row.flashmla_us, row.flashmla_plan_us = per_layer[-1], per_plan[-1]
    if options.check:
        exact = truth(inputs)
        errors = []
        for one in timed.values():
            one.out.fill_(math.nan)
            one.decode.replay()
            errors.append(worst_error(one.out, exact))
        row.error = largest([error for error in errors if error is not None])
        if peer:
            peer.decode.replay()
            row.flashmla_error = worst_error(peer.out, exact)
            row.difference = distance(next(iter(timed.values())).out, peer.out)
    return row


# ---------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = _Parser(
        prog="bench_decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--batch",
        nargs="+",
        metavar="B",
        help=f"names of the grid ({', '.join(grid_batches())}) or vLLM's grammar: 1q1s128k_31q1s2k",
    )
    p.add_argument("--heads", nargs="+", type=int, metavar="N", help="query heads, 1..128")
    p.add_argument("--q", nargs="+", type=int, metavar="N", help="query tokens per request")
    p.add_argument(
        "--only", nargs="+", metavar="TEXT", help="keep labels that contain one: u16x8K /64x1"
    )
    p.add_argument("--quick", action="store_true", help="16 shapes, 10 repeats, within a minute")
    p.add_argument(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=["balanced", "equal"],
        help="side by side; fractions and ratios are of the first (default: balanced equal)",
    )
    p.add_argument(
        "--flashmla", metavar="PATH", help="FlashMLA's FP8 library of vLLM's wheel, timed in turn"
    )
    p.add_argument("--repeats", type=int, help="timed replays per shape (default 20)")
    p.add_argument(
        "--seconds", type=float, default=4.0, help="limit of a shape's replays (default 4)"
    )
    p.add_argument(
        "--sustained",
        type=float,
        metavar="S",
        help="instead of --repeats and --seconds: S seconds of each graph alone, as much before: "
        "speed at the card's power limit; 60 shapes of two policies take 4 * S minutes",
    )
    p.add_argument("--fp16-partials", action="store_true", help="unmerged results of kbmla as FP16")
    p.add_argument(
        "--backend", choices=("sm90", "cuda"), help="of kbmla (default: the device's fastest)"
    )
    p.add_argument("--no-check", action="store_true", help="do not compare outputs with float64")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the run; --load prints it")
    p.add_argument("--csv", type=Path, metavar="FILE", help="write the rows")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw time over roof (matplotlib)")
    p.add_argument("--load", type=Path, metavar="FILE", help="print a file of --json; needs no GPU")
    return p


def _print_all(rows: Sequence[Row], limits: timing.Ceilings, gpu: str) -> int:
    print(f"\n{summary(rows, limits, gpu)}")
    return 0 if all(row.good for row in rows) else 1


def _reprint(args: argparse.Namespace) -> int:
    rows, limits, about = read_json(args.load)
    with_run = any(row.flashmla_us is not None for row in rows)
    if rows:
        print(mode(about))
        print(header(list(rows[0].us), with_run))
    for row in rows:
        print(line(row, with_run))
    if args.csv:
        write_csv(args.csv, rows)
    if args.plot and rows:
        plot(args.plot, rows, str(about["gpu"]))
    return _print_all(rows, limits, str(about["gpu"]))


def _rows(
    shapes: Sequence[Shape],
    limits: timing.Ceilings,
    l2_bytes: int,
    options: Options,
    flashmla: FlashMla | None,
) -> Iterator[Row]:
    """Measures the shapes one after the other over one pool of pages."""
    pages = max(shape.layers * shape.pages for shape in shapes)
    cache = gaussian(pages, PAGE, HEAD_DIM_QK, seed=0)
    for shape in shapes:
        yield measure(shape, cache, limits, l2_bytes, options, flashmla)


def _run(args: argparse.Namespace) -> int:
    repeats = args.repeats if args.repeats is not None else (10 if args.quick else 20)
    if repeats < 1 or not 0 < args.seconds < math.inf:
        raise ValueError(
            f"--repeats, --seconds: expected at least 1, and above 0 and finite, got {repeats}, "
            f"{args.seconds}"
        )
    if args.sustained is not None and not 0 < args.sustained < math.inf:
        raise ValueError(f"--sustained: expected above 0 and finite, got {args.sustained}")
    if args.sustained is not None and args.repeats is not None:
        raise ValueError("--sustained, --repeats: expected one of them, got both")
    shapes = select(args.batch, args.heads, args.q, args.only, args.quick)
    policies = tuple(dict.fromkeys(args.policies))
    if args.plot:
        pyplot()
    if not torch.cuda.is_available():
        raise RuntimeError("needs a CUDA device, torch sees none; bench_cpu.py times the CPU")
    device = torch.device("cuda", torch.cuda.current_device())
    for shape in shapes:
        if not supported(shape.heads, shape.q, device):
            raise NotImplementedError(
                f"{shape.label}: this build of kbmla does not decode it on {device} "
                f"({torch.cuda.get_device_name(device)})"
            )
    flashmla = FlashMla(args.flashmla) if args.flashmla else None

    state = timing.gpu_state()
    about: dict[str, Any] = {
        **state,
        "kbmla": build_info(),
        "backend": args.backend,
        "fp16_partials": args.fp16_partials,
        "sustained": args.sustained,
        "flashmla": args.flashmla,
    }
    gpu, l2_bytes = str(state["gpu"]), int(state["l2_bytes"])
    print(", ".join(f"{name} {value}" for name, value in state.items()))
    print(mode(about))
    limits = timing.ceilings()
    options = Options(
        policies=policies,
        repeats=repeats,
        seconds=args.seconds,
        check=not args.no_check,
        partial_fp16=args.fp16_partials,
        backend=args.backend,
        sustained=args.sustained,
    )
    print(header(policies, flashmla is not None), flush=True)
    rows: list[Row] = []
    try:
        for row in _rows(shapes, limits, l2_bytes, options, flashmla):
            rows.append(row)
            print(line(row, flashmla is not None), flush=True)
    finally:
        # What was measured before an error or an interrupt is kept.
        about["after"] = timing.gpu_state() if sys.exc_info()[0] is None else None
        if args.json:
            write_json(args.json, rows, limits, about)
        if args.csv:
            write_csv(args.csv, rows)
    if args.plot and rows:
        plot(args.plot, rows, gpu)
    return _print_all(rows, limits, gpu)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (sys.argv without the program by default); returns the exit status."""
    args = parser().parse_args(argv)
    try:
        return _reprint(args) if args.load else _run(args)
    except (ValueError, NotImplementedError, RuntimeError, MemoryError, OSError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"bench_decode: error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
