# SPDX-License-Identifier: Apache-2.0
"""What a decode computes, in float64 PyTorch: the exact result, and a model of the kernels' rule
for storing probabilities as E4M3.

Slow, meant to be read and compared with. Only bytes that a request owns are read, one token row at
a time through the block table. Log-sum-exps are base 2 everywhere.

Shapes and types shared by the functions below:
    query        [B, q, heads, 576] float8_e4m3fn
    cache        [pages, page, 576] float8_e4m3fn; a row is a key, its first 512 columns a value
    block_table  [B, max_pages] int32
    lengths      [B] int32, KV tokens of this rank; <= 0 means none
    scales       (softmax scale, output scale)
    totals, cp   [B] int32 global lengths and (world, rank, interleave), under context parallelism
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "STEP_TOKENS",
    "attention",
    "e4m3_model",
    "fp22_products",
    "local_length",
    "merge",
    "visible_keys",
]

HEAD_DIM_V = 512
TILE_TOKENS = 128
# Keys that share a look at the row maximum, by backend; divisors of a tile.
STEP_TOKENS = {"cpu": 128, "cuda": 64, "sm90": 128}
# What backend "sm90" adds to P before rounding it, since its tensor cores cut off sums with V.
FP22_LEAST_CUT = 2.4e-4
MAX_SPLITS = 256
E4M3_MAX = 448.0
LOG2E = math.log2(math.e)
_CHUNK_TOKENS = 16384
_FP22_CHUNK_PAIRS = 1 << 19


def local_length(total: int, cp: tuple[int, int, int]) -> int:
    """How many of the first `total` tokens live on a rank; cp is (world, rank, interleave)."""
    world, rank, interleave = cp
    full, rest = divmod(total, interleave * world)
    return full * interleave + min(max(rest - rank * interleave, 0), interleave)


def visible_keys(
    length: int,
    q: int,
    *,
    total: int | None = None,
    cp: tuple[int, int, int] = (1, 0, 1),
    causal: bool = True,
) -> list[int]:
    """Leading local keys that each of the `q` query tokens sees.

    Token t is the global token `total - q + t` and sees keys up to its own; the bound is formed
    in global positions and then made local. `total` defaults to `length`.
    """
    length = max(length, 0)
    if not causal:
        return [length] * q
    total = length if total is None else total
    bounds = (max(total - (q - 1) + t, 0) for t in range(q))
    return [min(local_length(bound, cp), length) for bound in bounds]


def _rows(cache: Tensor, table: Tensor, begin: int, end: int) -> Tensor:
    """Tokens begin..end of one request as [end - begin, 576] float64."""
    token = torch.arange(begin, end, device=cache.device)
    page, slot = token // cache.shape[1], token % cache.shape[1]
    rows = cache.view(torch.uint8)[table[page].long(), slot]
    return rows.view(torch.float8_e4m3fn).double()


def _chunks(begin: int, end: int) -> list[tuple[int, int]]:
    """begin..end in pieces that bound the memory of float64 rows."""
    return [(i, min(i + _CHUNK_TOKENS, end)) for i in range(begin, end, _CHUNK_TOKENS)]


def _requests(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    totals: Tensor | None,
    cp: tuple[int, int, int],
    causal: bool,
) -> list[tuple[int, Tensor]]:
    """Per request: its readable length, and the keys each of its q * heads rows sees."""
    batch, q, heads, _ = query.shape
    world, rank, interleave = cp
    if world < 1 or interleave < 1 or not 0 <= rank < world:
        raise ValueError(f"cp: expected world, interleave >= 1 and 0 <= rank < world, got {cp}")
    if world > 1 and totals is None:
        raise ValueError("totals: expected the global lengths, as cp has more than one rank")
    sizes = {"block_table": block_table, "lengths": lengths, "totals": totals}
    for name, tensor in sizes.items():
        if tensor is not None and tensor.shape[0] != batch:
            raise ValueError(f"{name}: expected {batch} requests, got {tensor.shape[0]}")
    limit = block_table.shape[1] * cache.shape[1]
    found = []
    for b, length in enumerate(lengths.tolist()):
        total = None if totals is None else int(totals[b])
        length = min(max(length, 0), limit)
        visible = visible_keys(length, q, total=total, cp=cp, causal=causal)
        rows = torch.tensor(visible, device=query.device).repeat_interleave(heads)
        found.append((length, rows))
    return found


def _binade(x: Tensor) -> Tensor:
    """The largest power of two that is at most |x|, exactly; 0 of 0."""
    mantissa, _ = torch.frexp(x)
    return torch.where(x == 0, 0.0, x / mantissa / 2)


def _cut(x: Tensor, unit: Tensor) -> Tensor:
    """x without its part below `unit`, towards zero. Where unit is 0, x is."""
    unit = unit.clamp_min(2.0**-1000)
    return torch.trunc(x / unit) * unit


def fp22_products(queries: Tensor, keys: Tensor) -> Tensor:
    """queries @ keys.T as the FP8 tensor cores of SM90 compute it, and csrc/sm90 uses them.

    One wgmma step adds 32 products to an accumulator. All 33 numbers lose what is below 2^-13 of
    the largest one's binade, towards zero; so does their sum, of its own. The binade of a product
    is that of its factors' binades, and a subnormal factor counts as 2^-6. Panels of 128 channels
    are summed apart and then added in FP32.

    Args:
        queries: [rows, 576] float64, values of E4M3, and so [n, 576] keys.

    Returns:
        [rows, n] float64.
    """
    total = queries.new_zeros(queries.shape[0], keys.shape[0])
    q_binade, k_binade = (_binade(x).clamp_min(2.0**-6) * (x != 0) for x in (queries, keys))
    for panel in range(0, queries.shape[1], 128):
        held = torch.zeros_like(total)
        for step in range(panel, min(panel + 128, queries.shape[1]), 32):
            at = slice(step, step + 32)
            largest = (q_binade[:, None, at] * k_binade[:, at]).amax(dim=2)
            unit = torch.maximum(largest, _binade(held)) * 2.0**-13
            products = _cut(queries[:, None, at] * keys[:, at], unit[:, :, None])
            held = _cut(held, unit) + products.sum(dim=2)
            held = _cut(held, _binade(held) * 2.0**-13)
        total = (total + held).float().double()
    return total


def _scores(
    queries: Tensor,
    scale: float,
    cache: Tensor,
    table: Tensor,
    visible: Tensor,
    length: int,
    fp22: bool,
) -> Tensor:
    """scale * queries @ keys.T of a request, [rows, length] float64; -inf if hidden."""
    scores = queries.new_empty(queries.shape[0], length)
    most = max(1, _FP22_CHUNK_PAIRS // queries.shape[0]) if fp22 else _CHUNK_TOKENS
    for begin in range(0, length, most):
        keys = _rows(cache, table, begin, min(begin + most, length))
        part = fp22_products(queries, keys) if fp22 else queries @ keys.T
        scores[:, begin : begin + most] = part * scale
    hidden = torch.arange(length, device=queries.device) >= visible[:, None]
    return scores.masked_fill_(hidden, -math.inf)


def attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scales: tuple[float, float],
    *,
    totals: Tensor | None = None,
    cp: tuple[int, int, int] = (1, 0, 1),
    causal: bool = True,
    fp22: bool = False,
) -> tuple[Tensor, Tensor]:
    """The exact result, of the dequantised inputs.

    Args:
        fp22: take the scores from `fp22_products`, whose error moves an lse by about 2e-4.

    Returns:
        out [B, q, heads, 512] float64 and lse [B, q, heads] float64 in base 2. A row that sees no
        key has out 0 and lse -inf.

    Raises:
        ValueError: `cp` out of range, missing `totals`, or sizes that disagree.
    """
    softmax_scale, output_scale = scales
    batch, q, heads, _ = query.shape
    out = torch.zeros(batch, q, heads, HEAD_DIM_V, dtype=torch.float64, device=query.device)
    lse = torch.full((batch, q, heads), -math.inf, dtype=torch.float64, device=query.device)
    requests = _requests(query, cache, block_table, lengths, totals, cp, causal)
    for b, (length, visible) in enumerate(requests):
        queries = query[b].reshape(q * heads, -1).double()
        scale = softmax_scale * LOG2E
        scores = _scores(queries, scale, cache, block_table[b], visible, length, fp22)
        # logsumexp is the natural one: ln 2 and back.
        row_lse = torch.logsumexp(scores * math.log(2), dim=1) * LOG2E
        weights = torch.exp2(scores - row_lse.nan_to_num(neginf=0.0)[:, None])
        values = torch.zeros(q * heads, HEAD_DIM_V, dtype=torch.float64, device=query.device)
        for begin, end in _chunks(0, length):
            rows = _rows(cache, block_table[b], begin, end)
            values += weights[:, begin:end] @ rows[:, :HEAD_DIM_V]
        out[b] = values.view(q, heads, HEAD_DIM_V) * output_scale
        lse[b] = row_lse.view(q, heads)
    return out, lse


def merge(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor
) -> tuple[Tensor, Tensor]:
    """Merges results over disjoint keys (splits of a request, or ranks) by their base-2 lse.

    Args:
        outs: R results [..., 512], a sequence or stacked along dim 0.
        lses: R base-2 log-sum-exps [...], likewise. Where one is -inf its out is not used.

    Returns:
        out [..., 512] and base-2 lse [...], float64.

    Raises:
        ValueError: no results, or sizes that disagree.
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"outs, lses: expected as many of each, got {len(outs)} and {len(lses)}")
    out = torch.stack(list(outs)).double()
    lse = torch.stack(list(lses)).double()
    if out.shape[:-1] != lse.shape:
        raise ValueError(
            f"outs, lses: expected [..., D] and [...], got {tuple(out.shape)}, {tuple(lse.shape)}"
        )
    most = lse.amax(dim=0)
    empty = most.isneginf()
    weights = torch.exp2(lse - most.masked_fill(empty, 0.0))
    used = out.masked_fill(lse.isneginf().unsqueeze(-1), 0.0)
    total = weights.sum(dim=0)
    merged = (weights.unsqueeze(-1) * used).sum(dim=0) / total.masked_fill(empty, 1.0).unsqueeze(-1)
    return merged, most + torch.log2(total.masked_fill(empty, 1.0))


def _e4m3(values: Tensor) -> Tensor:
    """Round to nearest even to E4M3, saturating, and back."""
    small = values.clamp(-E4M3_MAX, E4M3_MAX).float()
    return small.to(torch.float8_e4m3fn).double()


def _split_ranges(tiles: int, count: int) -> list[tuple[int, int]]:
    """Tile ranges of `count` splits, after the normalisation that leaves none empty."""
    if tiles == 0:
        return [(0, 0)]
    per = -(-tiles // min(max(count, 1), tiles, MAX_SPLITS))
    return [(begin, min(begin + per, tiles)) for begin in range(0, tiles, per)]


def _held_maxima(scores: Tensor, step: int, allowance: float) -> Tensor:
    """The maximum [rows, steps] that each step of `step` scores uses, step after step.

    No steps give one column of -inf.
    """
    tiles = max(1, -(-scores.shape[1] // step))
    padding = tiles * step - scores.shape[1]
    padded = torch.nn.functional.pad(scores, (0, padding), value=-math.inf)
    tops = padded.view(-1, tiles, step).amax(dim=2)
    held = torch.empty_like(tops)
    m = torch.full_like(tops[:, 0], -math.inf)
    for tile in range(tiles):
        top = torch.maximum(m, tops[:, tile])
        # Holds for the first visible key too, which is inf above; -inf above -inf is NaN, not more.
        m = torch.where(top - m > allowance, top, m)
        held[:, tile] = m
    return held


def e4m3_model(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scales: tuple[float, float],
    *,
    totals: Tensor | None = None,
    cp: tuple[int, int, int] = (1, 0, 1),
    causal: bool = True,
    counts: Tensor | None = None,
    p_scale: float = 1.0,
    step: int = TILE_TOKENS,
    fp22: bool = False,
) -> tuple[Tensor, Tensor]:
    """The kernels' result but for FP32 and BF16 rounding: what E4M3 probabilities alone cost.

    Each split goes through its keys in order, `step` at a time. A row keeps its maximum m while the
    new one is at most 8 - log2(p_scale) above it in base-2 units; otherwise it takes the new one
    and rescales. Probabilities enter the sum unrounded, the product with V as E4M3(p * p_scale).

    Args:
        counts: [>= B] int32 splits per request; None is one split each.
        p_scale: power of two in 1..256.
        step: keys that share a look at the maximum, a divisor of 128: `STEP_TOKENS`.
        fp22: as backend "sm90" does, take the scores from `fp22_products` and round P times
            1 + `FP22_LEAST_CUT`. That its sums with V are cut off, too, is left out.

    Returns:
        As `attention`.

    Raises:
        ValueError: as `attention`, and for `p_scale` or too few `counts`.
    """
    softmax_scale, output_scale = scales
    batch, q, heads, _ = query.shape
    if p_scale not in [2.0**i for i in range(9)]:
        raise ValueError(f"p_scale: expected a power of two in 1..256, got {p_scale}")
    if step < 1 or TILE_TOKENS % step:
        raise ValueError(f"step: expected a divisor of {TILE_TOKENS}, got {step}")
    if counts is not None and counts.shape[0] < batch:
        raise ValueError(f"counts: expected at least {batch} requests, got {counts.shape[0]}")
    allowance = 8.0 - math.log2(p_scale)
    stored_scale = p_scale * (1 + FP22_LEAST_CUT) if fp22 else p_scale
    out = torch.empty(batch, q, heads, HEAD_DIM_V, dtype=torch.float64, device=query.device)
    lse = torch.empty(batch, q, heads, dtype=torch.float64, device=query.device)
    requests = _requests(query, cache, block_table, lengths, totals, cp, causal)
    for b, (length, visible) in enumerate(requests):
        queries = query[b].reshape(q * heads, -1).double()
        scale = softmax_scale * LOG2E
        scores = _scores(queries, scale, cache, block_table[b], visible, length, fp22)
        outs, lses = [], []
        count = 1 if counts is None else int(counts[b])
        for first, last in _split_ranges(-(-length // TILE_TOKENS), count):
            split_end = min(last * TILE_TOKENS, length)
            split_begin = first * TILE_TOKENS
            held = _held_maxima(scores[:, split_begin:split_end], step, allowance)
            m = held[:, -1:]
            total = torch.zeros_like(m)
            values = m.new_zeros(q * heads, HEAD_DIM_V)
            for begin, end in _chunks(split_begin, split_end):
                index = (torch.arange(begin, end, device=query.device) - split_begin) // step
                step_m = held[:, index]
                p = torch.exp2(scores[:, begin:end] - step_m.masked_fill(step_m.isneginf(), 0.0))
                # All later rescales of a step's sums at once.
                rescale = torch.exp2(step_m - m.masked_fill(m.isneginf(), 0.0))
                total += (p * rescale).sum(dim=1, keepdim=True)
                rows = _rows(cache, block_table[b], begin, end)[:, :HEAD_DIM_V]
                values += _e4m3(p * stored_scale) * rescale @ rows / p_scale
            empty = m.isneginf()
            outs.append(values / total.masked_fill(empty, 1.0))
            lses.append((m + torch.log2(total.masked_fill(empty, 1.0))).squeeze(1))
        merged, merged_lse = merge(outs, lses)
        out[b] = merged.view(q, heads, HEAD_DIM_V) * output_scale
        lse[b] = merged_lse.view(q, heads)
    return out, lse
