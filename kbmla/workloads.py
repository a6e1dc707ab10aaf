# SPDX-License-Identifier: Apache-2.0
"""Batches to decode: lengths (uniform, mixed, log-normal, drawn from serving traces, or written in
vLLM's batch grammar) and paged caches filled for them.

Lengths are KV tokens per request and include the query tokens of the step. Everything is
deterministic in its arguments.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

__all__ = [
    "Batch",
    "Request",
    "draw",
    "lognormal",
    "mixed",
    "paged_cache",
    "parse",
    "trace_names",
    "trace_source",
    "uniform",
]

HEAD_DIM_QK = 576
NAN_BYTE = 0x7F  # a NaN of float8_e4m3fn
HUGE_PAGE = 2**30  # no cache has this page: reading it faults or raises


# ---------------------------------------------------------------- lengths


def uniform(requests: int, length: int) -> list[int]:
    """`requests` equal lengths. ValueError unless both are >= 0."""
    return mixed((requests, length))


def mixed(*groups: tuple[int, int]) -> list[int]:
    """Lengths from (requests, length) groups, in order: `mixed((1, 131072), (31, 2048))`.

    ValueError unless all numbers are >= 0.
    """
    for count, length in groups:
        if count < 0 or length < 0:
            raise ValueError(f"group: expected numbers >= 0, got ({count}, {length})")
    return [length for count, length in groups for _ in range(count)]


def lognormal(
    requests: int,
    mean: float,
    sigma: float = 1.3,
    *,
    seed: int = 7,
    low: int = 16,
    high: int = 131072,
) -> list[int]:
    """Lengths exp(N(mean, sigma)) in tokens, limited to `low`..`high`.

    `mean` and `sigma` are those of the natural logarithm: `lognormal(64, 8.0)` is a batch of
    64 requests with a median near 2981 tokens. ValueError if `requests < 0` or the limits are not
    0 <= low <= high.
    """
    if requests < 0 or not 0 <= low <= high:
        raise ValueError(
            "requests, low, high: expected requests >= 0 and 0 <= low <= high, "
            f"got {requests}, {low}, {high}"
        )
    generator = torch.Generator().manual_seed(seed)
    logs = torch.randn(requests, generator=generator) * sigma + mean
    return [int(x) for x in logs.exp().clamp(low, high).tolist()]


@functools.cache
def _traces() -> dict[str, Any]:
    text = importlib.resources.files("kbmla").joinpath("data", "traces.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def trace_names() -> list[str]:
    """Names that `draw` accepts, sorted."""
    return sorted(_traces()["traces"])


def _trace(trace: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = _traces()["traces"][trace]
    except KeyError:
        raise ValueError(
            f"trace: expected one of {', '.join(trace_names())}, got {trace!r}"
        ) from None
    return found


def trace_source(trace: str) -> str:
    """Where the percentiles of `trace` come from. ValueError for an unknown name."""
    return str(_trace(trace)["source"])


def draw(trace: str, requests: int, seed: int) -> list[int]:
    """Lengths (tokens, >= 1) of `requests` requests as a decode step of a serving trace sees them.

    The rule is written beside the numbers in `data/traces.json`: the log of the length is
    interpolated between published percentiles.

    Raises:
        ValueError: an unknown trace, or `requests < 0`.
    """
    entry = _trace(trace)
    if requests < 0:
        raise ValueError(f"requests: expected a number >= 0, got {requests}")
    values = entry["percentiles"]
    knots = [0, *entry.get("knots", _traces()["knots"])]
    logs = [math.log(x) for x in (0.3 * values[0], *values)]
    most = 1.1 * values[knots.index(99) - 1] if entry["cap"] else math.inf

    def length(percentile: float) -> int:
        i = next((i for i in range(1, len(knots)) if percentile <= knots[i]), len(knots) - 1)
        share = (percentile - knots[i - 1]) / (knots[i] - knots[i - 1])
        drawn = math.exp(logs[i - 1] + share * (logs[i] - logs[i - 1]))
        return max(1, int(min(drawn, most)))

    generator = torch.Generator().manual_seed(seed)
    percentiles = torch.rand(requests, generator=generator, dtype=torch.float64) * 100
    return [length(p) for p in percentiles.tolist()]


# ---------------------------------------------------------------- vLLM's batch grammar


class Request(NamedTuple):
    """One request of a step: `q` query tokens over `length` KV tokens, the q included."""

    q: int
    length: int


_SEGMENT = re.compile(r"(\d+)?q(\d+)(k?)(?:s(\d+)([km]?))?", re.ASCII)
_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_MAX_COUNT, _MAX_TOKENS = 2**16, 2**31 - 1


def parse(grammar: str) -> list[Request]:
    """Requests of a batch in the grammar of vLLM's attention benchmarks.

    Segments joined by `_`, each `[N]q<tokens>[k][s<tokens>[k|m]]`: N requests (1 if left out)
    of q query tokens over s KV tokens (q if left out). `k` is a factor of 1024; `m`, of
    1048576, is an addition. `1q1s128k_31q1s2k` is one request of 131072 tokens and 31 of 2048.

    Raises:
        ValueError: a segment that does not fit, a count or q of zero, s below q, more than 65536
            requests in a segment, or 2**31 tokens in one.
    """
    requests: list[Request] = []
    for segment in grammar.strip().split("_"):
        match = _SEGMENT.fullmatch(segment)
        if match is None:
            raise ValueError(
                f"batch {grammar!r}: segment {segment!r} is not [N]q<tokens>[k][s<tokens>[k|m]], "
                "such as 31q1s2k"
            )
        count, q, q_unit, length, unit = match.groups()
        number = int(count) if count else 1
        tokens = int(q) * _UNITS[q_unit]
        kv = int(length) * _UNITS[unit] if length else tokens
        if number > _MAX_COUNT or kv > _MAX_TOKENS:
            raise ValueError(
                f"batch {grammar!r}: segment {segment!r} exceeds {_MAX_COUNT} requests "
                f"or {_MAX_TOKENS} tokens"
            )
        if number < 1 or tokens < 1:
            raise ValueError(f"batch {grammar!r}: segment {segment!r} has a count or q of zero")
        if kv < tokens:
            raise ValueError(
                f"batch {grammar!r}: segment {segment!r} has fewer KV tokens ({kv}) than query "
                f"tokens ({tokens}), which they include"
            )
        requests += [Request(tokens, kv)] * number
    return requests


# ---------------------------------------------------------------- paged caches


@dataclass(frozen=True)
class Batch:
    """Inputs of one decode step.

    Attributes:
        query: [B, q, heads, 576] float8_e4m3fn.
        cache: [pages, page, 576] float8_e4m3fn.
        block_table: [B, max_pages] int32.
        lengths: [B] int32, KV tokens per request.
    """

    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor

    @property
    def tokens(self) -> int:
        """KV tokens of all requests (waits for a GPU)."""
        return int(self.lengths.clamp_min(0).sum())

    @property
    def kv_bytes(self) -> int:
        """Bytes of cache that a decode must read (waits for a GPU)."""
        return self.tokens * HEAD_DIM_QK

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        tensors = (self.query, self.cache, self.block_table, self.lengths)
        return Batch(*(t.to(device) for t in tensors))


_CHUNK_ELEMENTS = 2**24


def _fill_gaussian(bytes_out: torch.Tensor, generator: torch.Generator) -> None:
    """Fills a contiguous uint8 tensor with N(0, 1) as E4M3, a bounded piece at a time."""
    flat = bytes_out.view(-1)
    for begin in range(0, flat.numel(), _CHUNK_ELEMENTS):
        part = flat[begin : begin + _CHUNK_ELEMENTS]
        values = torch.randn(part.numel(), generator=generator, device=flat.device)
        part.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))


def paged_cache(
    lengths: Sequence[int],
    page_size: int,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    poison: bool = True,
    q: int = 1,
    heads: int = 64,
) -> Batch:
    """A paged cache and a query of Gaussian E4M3 data for requests of `lengths` tokens.

    Pages are handed out in random order from a cache two pages larger than needed. With `poison`
    every byte that no request owns (spare pages, slots past a length) is a NaN, and every unused
    entry of the block table, two columns of them at least, names page 2**30, so that a read past a
    length shows; without it both are zero. Data is drawn on `device`: the same seed gives other
    data on another kind of device.

    Args:
        lengths: tokens per request; <= 0 means none.
        page_size: tokens per page, >= 1.
        device: where the tensors live.
        seed: of the data and of the page order.
        poison: see above.
        q: query tokens per request, >= 1.
        heads: query heads, >= 1.

    Raises:
        ValueError: `page_size`, `q` or `heads` below 1.
    """
    if min(page_size, q, heads) < 1:
        raise ValueError(
            f"page_size, q, heads: expected numbers >= 1, got {page_size}, {q}, {heads}"
        )
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    filler, unused = (NAN_BYTE, HUGE_PAGE) if poison else (0, 0)

    pages = [-(-max(n, 0) // page_size) for n in lengths]
    total = sum(pages)
    order = torch.randperm(total + 2, generator=torch.Generator().manual_seed(seed))
    cache = torch.empty(total + 2, page_size, HEAD_DIM_QK, dtype=torch.uint8, device=device)
    _fill_gaussian(cache, generator)
    cache[order[total:].to(device)] = filler
    table = torch.full((len(lengths), max(pages, default=0) + 2), unused, dtype=torch.int32)
    first = 0
    for b, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        if count:
            mine = order[first : first + count]
            table[b, :count] = mine
            cache[int(mine[-1]), length - (count - 1) * page_size :] = filler
            first += count

    query = torch.empty(len(lengths), q, heads, HEAD_DIM_QK, dtype=torch.uint8, device=device)
    _fill_gaussian(query, generator)
    return Batch(
        query.view(torch.float8_e4m3fn),
        cache.view(torch.float8_e4m3fn),
        table.to(device),
        torch.tensor(list(lengths), dtype=torch.int32, device=device),
    )
