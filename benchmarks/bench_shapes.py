# SPDX-License-Identifier: Apache-2.0
"""The shapes bench_decode.py times: its grid, any other by vLLM's batch grammar, their page tables,
and the figures recorded of FlashMLA on the grid. Plain arithmetic, no GPU.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kbmla import workloads

HEAD_DIM_QK, HEAD_DIM_V = 576, 512
PAGE = 64  # tokens; FlashMLA takes no other
PAGE_BYTES = PAGE * HEAD_DIM_QK
ROTATION_BYTES = 400e6  # of all layers of a step: several times the L2 cache
# Layers of a step: enough that the event's own gap of 1-2 us is small per layer, few enough that
# capturing a step stays quick.
MIN_LAYERS, MAX_LAYERS = 4, 256
POOL_BYTES = 24e9  # pages of all layers of a step

SHAPES = ((12, 1), (12, 5), (64, 1), (96, 1), (128, 1), (96, 5))
QUICK = (("u1x8K", "u16x8K", "m1x128K+31x2K", "logn64"), ((12, 1), (64, 1), (128, 1), (96, 5)))
PEERS = Path(__file__).with_name("peers_h200.json")


@functools.cache
def grid_batches() -> dict[str, list[int]]:
    """KV lengths in tokens of the grid's batches, by name."""
    return {
        "u1x8K": workloads.uniform(1, 8192),
        "u1x128K": workloads.uniform(1, 131072),
        "u16x8K": workloads.uniform(16, 8192),
        "u64x4K": workloads.uniform(64, 4096),
        "u128x8K": workloads.uniform(128, 8192),
        "m1x32K+7x1K": workloads.mixed((1, 32768), (7, 1024)),
        "m1x128K+31x2K": workloads.mixed((1, 131072), (31, 2048)),
        "m4x64K+60x1K": workloads.mixed((4, 65536), (60, 1024)),
        "logn64": workloads.lognormal(64, 8.0),
        "logn256": workloads.lognormal(256, 7.5),
    }


@functools.cache
def peers() -> dict[tuple[str, int, int], float]:
    """Recorded microseconds of FlashMLA per layer by (batch, heads, q)."""
    rows = json.loads(PEERS.read_text("utf-8"))["rows"]
    return {(row["batch"], row["heads"], row["q"]): float(row["fp8_us"]) for row in rows}


# ---------------------------------------------------------------- what to run


@dataclass(frozen=True)
class Shape:
    """One row of the table: a batch's lengths (tokens), heads and query tokens per request."""

    batch: str
    lengths: tuple[int, ...]
    heads: int
    q: int

    @property
    def label(self) -> str:
        return f"{self.batch}/{self.heads}x{self.q}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one layer's cache that a decode must read."""
        return self.tokens * HEAD_DIM_QK

    @property
    def pages(self) -> int:
        """Pages of one layer."""
        return sum(-(-length // PAGE) for length in self.lengths)

    @property
    def flops(self) -> int:
        """FLOP of one layer's two products."""
        return 2 * (HEAD_DIM_QK + HEAD_DIM_V) * self.heads * self.q * self.tokens

    @property
    def layers(self) -> int:
        """Layers of a step: as many as make the caches cold, within the pool."""
        wanted = max(MIN_LAYERS, math.ceil(ROTATION_BYTES / self.kv_bytes))
        fit = int(POOL_BYTES / (self.pages * PAGE_BYTES))
        if fit < 1:
            raise ValueError(
                f"batch {self.batch!r}: one layer's cache has {self.kv_bytes / 1e9:.1f} GB, the "
                f"benchmark's pool of pages {POOL_BYTES / 1e9:.0f}"
            )
        return min(wanted, MAX_LAYERS, fit)


def _grammar_shape(text: str, heads: int, q: Sequence[int] | None) -> Shape:
    """A shape of a batch in vLLM's grammar, under the grid's name for it if the grid has it."""
    requests = workloads.parse(text)
    found = sorted({request.q for request in requests})
    if len(found) != 1:
        raise ValueError(f"batch {text!r}: expected one q in every segment, got q = {found}")
    if q is not None and list(q) != found:
        raise ValueError(f"--q: batch {text!r} says q = {found[0]}, got {list(q)}")
    lengths = [request.length for request in requests]
    name = next((name for name, known in grid_batches().items() if known == lengths), text)
    return Shape(name, tuple(lengths), heads, found[0])


def select(
    batches: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    q: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    quick: bool = False,
) -> list[Shape]:
    """The shapes of a command line, in the grid's order.

    Without `heads` and `q` the grid's own pairs; else every pair of the given ones, where heads
    default to the grid's and q to 1. `batches` are names of the grid or vLLM's grammar, which
    brings its own q. `only` keeps labels such as u16x8K/64x1 that contain one of the texts.

    ValueError: nothing left to run, a batch that is neither, or numbers the kernels do not take.
    """
    pairs: Sequence[tuple[int, int]] = QUICK[1] if quick else SHAPES
    all_heads = list(heads or dict.fromkeys(h for h, _ in pairs))
    if heads or q:
        pairs = [(h, t) for h in all_heads for t in (q or [1])]
    shapes = []
    for batch in batches or (QUICK[0] if quick else grid_batches()):
        lengths = grid_batches().get(batch)
        if lengths is not None:
            shapes += [Shape(batch, tuple(lengths), h, t) for h, t in pairs]
        else:
            shapes += [_grammar_shape(batch, h, q) for h in all_heads]
    if only:
        shapes = [s for s in shapes if any(text in s.label for text in only)]
    if not shapes:
        raise ValueError(f"--only: no shape's label contains {' or '.join(only or [])}")
    for shape in shapes:
        if not (1 <= shape.heads <= 128 and shape.q >= 1 and shape.heads * shape.q <= 1024):
            raise ValueError(
                f"{shape.label}: expected heads in 1..128, q >= 1 and heads x q <= 1024"
            )
        _ = shape.layers  # raises for a batch that does not fit
    return shapes


def page_tables(lengths: Sequence[int], layers: int, seed: int = 0) -> Tensor:
    """Block tables [layers, B, max_pages] int32 that give every layer pages of its own.

    The pages 0 .. layers * pages of a layer - 1 in one random order; unused entries are 0.
    """
    need = torch.tensor([-(-length // PAGE) for length in lengths])
    owned = torch.arange(int(need.max())) < need[:, None]
    total = int(need.sum())
    order = torch.randperm(layers * total, generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(layers, *owned.shape, dtype=torch.int32)
    tables[:, owned] = order.view(layers, total).to(torch.int32)
    return tables
