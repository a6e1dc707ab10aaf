# SPDX-License-Identifier: Apache-2.0
"""Command line: python -m kbmla {info,demo,plan,bench}.

Exit status: 0 done, 1 a result out of bounds, 2 a request that cannot be met, in one line on
stderr.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import picture, workloads
from ._lib import build_info
from .core import POLICIES
from .demo import Progress, Step, demo, measure, pick_device

GRAMMAR = "batch in vLLM's grammar, [N]q<tokens>[k][s<tokens>[k|m]] joined by _: 1q1s128k_31q1s2k"


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m kbmla",
        description="KV-balanced split-KV decode for multi-head latent attention.",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    commands.add_parser("info", help="versions and flags of this build")

    p = commands.add_parser("demo", help="decode a batch drawn from a serving trace and check it")
    names = ", ".join(workloads.trace_names())
    p.add_argument("--trace", default="mooncake-conversation", help=f"one of {names}")
    p.add_argument("--requests", type=int, default=8, help="default %(default)s")
    p.add_argument("--seed", type=int, default=11, help="default %(default)s")
    p.add_argument("--longest", type=int, default=32768, help="cut requests to so many tokens")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda[:N]")

    p = commands.add_parser("plan", help="split counts and a picture of a plan")
    p.add_argument("batch", nargs="?", metavar="GRAMMAR", help=GRAMMAR)
    p.add_argument("--trace", help=f"draw lengths instead, from one of {names}")
    p.add_argument("--requests", type=int, default=32, help="of the trace (default %(default)s)")
    p.add_argument("--seed", type=int, default=1, help="of the trace (default %(default)s)")
    p.add_argument("--q", type=int, help="query tokens per request of the trace (default 1)")
    p.add_argument("--clusters", type=int, help="width of the wave (default: this machine's)")
    p.add_argument("--policy", choices=POLICIES, help="default: balanced, drawn beside equal")
    p.add_argument("--heads", type=int, default=64, help="query heads (default %(default)s)")

    p = commands.add_parser("bench", help="time the decode of a batch")
    p.add_argument("batch", metavar="GRAMMAR", help=GRAMMAR)
    p.add_argument("--page-size", type=int, default=64, help="tokens (default %(default)s)")
    p.add_argument("--policy", choices=POLICIES, default="balanced", help="default %(default)s")
    p.add_argument("--clusters", type=int, help="width of the wave (default: the device's)")
    p.add_argument("--repeats", type=int, default=50, help="timed calls (default %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the data (default %(default)s)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda[:N]")
    p.add_argument("--heads", type=int, default=64, help="query heads (default %(default)s)")
    return parser


def _uniform_q(requests: Sequence[workloads.Request]) -> int:
    """The one q of a step; ValueError if requests differ in it."""
    found = sorted({request.q for request in requests})
    if len(found) != 1:
        raise ValueError(
            f"batch: expected the same q in every segment, got q = {', '.join(map(str, found))}; "
            "a step decodes one q"
        )
    return found[0]


def _info() -> int:
    for name, value in build_info().items():
        print(f"{name}: {value}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    if (args.batch is None) == (args.trace is None):
        raise ValueError("expected a batch in the grammar or --trace NAME, and not both")
    if args.batch is not None:
        requests = workloads.parse(args.batch)
        q, lengths = _uniform_q(requests), [request.length for request in requests]
        if args.q not in (None, q):
            raise ValueError(f"--q: the batch says q = {q}, got {args.q}")
    else:
        q = 1 if args.q is None else args.q
        lengths = workloads.draw(args.trace, args.requests, args.seed)
    policies = [args.policy] if args.policy else ["balanced", "equal"]
    plans = [
        picture.make_plan(lengths, heads=args.heads, q=q, clusters=args.clusters, policy=policy)
        for policy in policies
    ]
    print(picture.table(plans[0]))
    print()
    if len(plans) == 2:
        print(picture.beside(*plans))
    else:
        print("\n".join([picture.legend(plans[0]), *picture.draw(plans[0])]))
    return 0


def _bench(args: argparse.Namespace) -> int:
    requests = workloads.parse(args.batch)
    q, lengths = _uniform_q(requests), [request.length for request in requests]
    if args.repeats < 1:
        raise ValueError(f"--repeats: expected at least 1, got {args.repeats}")
    device = pick_device(args.device)
    with Progress(3) as bar:
        bar.step("fill the cache")
        batch = workloads.paged_cache(
            lengths, args.page_size, device=device, seed=args.seed, q=q, heads=args.heads
        )
        step = Step(batch, policy=args.policy, clusters=args.clusters)
        bar.step("plan")
        plans = measure(step.plan, device, repeats=args.repeats)
        bar.step("decode")
        decodes = measure(step.decode, device, repeats=args.repeats, seconds=20.0)
    median, plan = statistics.median(decodes), statistics.median(plans)
    print(
        f"{args.batch}: {len(lengths)} requests, {batch.tokens} KV tokens, heads {args.heads}, "
        f"q {q}, page {args.page_size}, {args.policy}, {step.clusters} clusters, {device}"
    )
    print(f"plan    {plan * 1e6:12.1f} us  median of {len(plans)}")
    print(
        f"decode  {median * 1e6:12.1f} us  median of {len(decodes)}, "
        f"{min(decodes) * 1e6:.1f} to {max(decodes) * 1e6:.1f}"
    )
    print(f"        {batch.tokens / median:12.4g} KV tokens/s")
    print(f"        {batch.kv_bytes / median / 1e9:12.2f} GB/s of KV")
    return 0


def _demo(args: argparse.Namespace) -> int:
    good = demo(
        args.trace,
        requests=args.requests,
        seed=args.seed,
        longest=args.longest,
        device=args.device,
    )
    return 0 if good else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (sys.argv without the program by default); returns the exit status."""
    try:
        args = _parser().parse_args(argv)
        commands = {"info": lambda _: _info(), "demo": _demo, "plan": _plan, "bench": _bench}
        status = commands[args.command](args)
        sys.stdout.flush()
        return status
    except (ValueError, NotImplementedError, RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"kbmla: error: {text}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader closed the pipe; keep the interpreter from flushing into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
