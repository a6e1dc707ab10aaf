# SPDX-License-Identifier: Apache-2.0
"""Text pictures of plans: which cluster reads which request's KV, and when.

Time is counted in tiles of 128 KV tokens, the unit of a plan, as if every tile took equally long.
Nothing here decides anything: a `Plan` is what the planner wrote, and a cluster's row is what the
work-list walk visits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from . import helpers
from .balanced import BalancedMla

__all__ = ["Piece", "Plan", "beside", "draw", "legend", "make_plan", "table"]

TILE_TOKENS = 128
WIDTH, ROWS = 100, 16
_LETTERS = "abcdefghijklmnopqrstuvwxy"
_REST = "z"


class Piece(NamedTuple):
    """One work entry as a cluster meets it; `tiles` of `request` that split `split` covers."""

    request: int
    q_tile: int
    split: int
    tiles: int


@dataclass(frozen=True)
class Plan:
    """A planned step.

    Attributes:
        policy: the rule that made it.
        lengths: KV tokens per request.
        counts: splits per request.
        q_tiles: query tiles per request.
        clusters: per cluster of the wave, its pieces in order.
    """

    policy: str
    lengths: list[int]
    counts: list[int]
    q_tiles: int
    clusters: list[list[Piece]] = field(repr=False)

    @property
    def loads(self) -> list[int]:
        """Tiles per cluster."""
        return [sum(piece.tiles for piece in pieces) for pieces in self.clusters]

    @property
    def finish(self) -> int:
        """Tiles of the cluster that ends last."""
        return max(self.loads, default=0)

    @property
    def mean(self) -> float:
        """Tiles per cluster if the work were spread evenly."""
        return sum(self.loads) / len(self.clusters)

    @property
    def imbalance(self) -> float:
        """Finish over mean: 1.0 is a perfect plan. 1.0 as well if there is no work."""
        return self.finish / self.mean if self.finish else 1.0

    @property
    def entries(self) -> int:
        """Work entries."""
        return sum(len(pieces) for pieces in self.clusters)


def _pieces(
    work: torch.Tensor, lengths: Sequence[int], counts: Sequence[int], q_tiles: int, clusters: int
) -> list[list[Piece]]:
    """The walk of every cluster over a work list."""
    params = helpers.MLAStaticTileSchedulerParams(True, len(lengths), q_tiles, (1, 1, 1), 1)

    def tiles(request: int, split: int) -> int:
        total = -(-max(lengths[request], 0) // TILE_TOKENS)
        first, last = helpers.split_bounds(total, counts[request], split)
        return last - first

    walks = [helpers.MLAWorkListTileScheduler(params, work, i, clusters) for i in range(clusters)]
    return [
        [Piece(b, q_tile, split, tiles(b, split)) for _, q_tile, b, split in
         (info.tile_idx for info in walk)]
        for walk in walks
    ]  # fmt: skip


def make_plan(
    lengths: Sequence[int],
    *,
    heads: int = 64,
    q: int = 1,
    clusters: int | None = None,
    policy: str = "balanced",
) -> Plan:
    """Plans a step on the CPU, for a wave of any width.

    Args:
        lengths: KV tokens per request, 1..1024 of them.
        heads, q: query heads, and query tokens per request.
        clusters: width of the wave; None is this machine's.
        policy: "balanced", "equal" or "fixed".

    Raises:
        ValueError, NotImplementedError: as `kbmla.core.KvBalancedMla`, and for no lengths.
    """
    if not lengths:
        raise ValueError("lengths: expected at least one request, got none")
    lengths = list(lengths)
    model = BalancedMla(heads, torch.device("cpu"), False, policy=policy, clusters=clusters)
    model.require(q, len(lengths))
    model.plan(q, torch.tensor(lengths, dtype=torch.int32))
    key = model.key(q, len(lengths))
    counts_tensor, work = model.plans[key]
    counts = counts_tensor[: len(lengths)].tolist()
    core = model.cores[key]
    q_tiles, width = core.sizes.num_q_tiles, core.clusters
    return Plan(policy, lengths, counts, q_tiles, _pieces(work, lengths, counts, q_tiles, width))


# ---------------------------------------------------------------- drawing


def _letters(lengths: Sequence[int]) -> list[str]:
    """A letter per request: a is the longest; those past the alphabet share the last letter."""
    order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    letters = [_REST] * len(lengths)
    for rank, request in enumerate(order[: len(_LETTERS)]):
        letters[request] = _LETTERS[rank]
    return letters


def _bar(pieces: Sequence[Piece], letters: Sequence[str], width: int, scale: float) -> str:
    """A cluster's time line in `width` columns; each piece starts with a capital."""
    bar, now = "", 0
    for piece in pieces:
        now += piece.tiles
        columns = min(round(now * scale), width) - len(bar)
        if columns > 0:
            letter = letters[piece.request]
            bar += letter.upper() + letter * (columns - 1)
    return bar


def _sample(loads: Sequence[int], rows: int) -> list[int]:
    """Clusters to show: all of them, or `rows` from the heaviest to the lightest."""
    if len(loads) <= rows:
        return list(range(len(loads)))
    order = sorted(range(len(loads)), key=lambda i: (-loads[i], i))
    return [order[round(i * (len(order) - 1) / (rows - 1))] for i in range(rows)]


def draw(plan: Plan, *, width: int = WIDTH, rows: int = ROWS, span: int | None = None) -> list[str]:
    """A plan as lines of at most `width` characters.

    A heading, then a row per cluster: its number, its pieces along time and its load in tiles. A
    piece is the letter of its request (a is the longest, z all past the 25th), its first column a
    capital; dots are waiting for the wave to end. With more clusters than `rows` (>= 2) the rows
    are a sample in order of load. `span` is the time in tiles that fills the width, by default the
    plan's own finish.
    """
    letters, loads = _letters(plan.lengths), plan.loads
    digits = max(len(str(len(loads) - 1)), len(str(plan.finish)))
    columns = width - 2 * digits - 4
    scale = columns / max(span or plan.finish, 1)
    end = min(round(plan.finish * scale), columns)
    lines = [
        f"{plan.policy}: {plan.entries} entries, ends at {plan.finish} tiles"[:width],
        f"{'':{digits}}  = {plan.imbalance:.2f} x mean {plan.mean:.1f}"[:width],
    ]
    for i in _sample(loads, rows):
        bar = _bar(plan.clusters[i], letters, columns, scale).ljust(end, ".").ljust(columns)
        lines.append(f"{i:>{digits}} |{bar}| {loads[i]:>{digits}}")
    return lines


def legend(plan: Plan, rows: int = ROWS) -> str:
    """One line that says how to read `draw`."""
    many = len(plan.clusters)
    shown = f"{rows} of {many} clusters, heaviest first" if many > rows else f"{many} clusters"
    return f"{shown}; time across; a = longest request; capital = new piece"


def beside(left: Plan, right: Plan, *, width: int = WIDTH, rows: int = ROWS) -> str:
    """Two plans of the same step on one time scale, left and right, with a legend.

    At most `width` (>= 60) columns and `rows` + 3 lines.
    """
    half = (width - 3) // 2
    span = max(left.finish, right.finish)
    panels = [draw(plan, width=half, rows=rows, span=span) for plan in (left, right)]
    height = max(len(panel) for panel in panels)
    padded = [panel + [""] * (height - len(panel)) for panel in panels]
    lines = [f"{a:<{half}}   {b}".rstrip() for a, b in zip(*padded, strict=True)]
    return "\n".join([legend(left, rows)[:width], *lines])


def table(plan: Plan, *, limit: int = 16) -> str:
    """Lengths and split counts per request, longest first; at most `limit` rows of them."""
    letters = _letters(plan.lengths)
    order = sorted(range(len(plan.lengths)), key=lambda b: (-plan.lengths[b], b))
    lines = ["request  letter   tokens  splits"]
    for b in order[:limit]:
        lines.append(f"{b:>7}  {letters[b]:>6}  {plan.lengths[b]:>7}  {plan.counts[b]:>6}")
    if len(order) > limit:
        rest = [plan.counts[b] for b in order[limit:]]
        lines.append(f"  and {len(rest)} shorter ones with {min(rest)} to {max(rest)} splits")
    return "\n".join(lines)
