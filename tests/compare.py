# SPDX-License-Identifier: Apache-2.0
"""Comparisons that say where and by how much, and the tolerances with their reasons."""

from __future__ import annotations

import math

import torch
from cases import Batch, has_fp22_scores

from kbmla import reference

# Norm of the error over norm of the reference on Gaussian data. Rounding P to E4M3 errs by 2^-3 /
# sqrt(12) of its binade, which over mantissas that are uniform in the logarithm is
# 2^-3 / sqrt(12) * sqrt(3 / (8 ln 2)) = 0.0265 of P; keys err independently and rows of V are
# nearly orthogonal, so the output errs by no more than that. A key that is its row's maximum is
# exact, which brings most batches to 0.013-0.017; a row whose retained maximum is an old one has
# none, and batches of a few hundred keys reach 0.0215. 0.003 is for the spread of small batches.
NORM_BOUND = 0.0265 + 0.003
# The same for one row: two keys may share it, both at the largest error, 2^-4. 2^-8 is for BF16.
ROW_BOUND = 2**-4 + 2**-8
# BF16 alone, by the formula above with steps of 2^-7 in a binade: 0.00166 of the value.
BF16_NORM = 2**-7 / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2)))
# log2. The sum uses unrounded P, so only FP32 rounding of the score (576 products, |score| up to
# some hundreds) and of exp2 remain.
LSE_BOUND = 2e-3
# Backend "sm90" alone: its scores are `reference.fp22_products`. Of each number added what is below
# 2^-13 of the largest one's binade is lost, at random below one unit, so the error of a Gaussian
# score follows from the rule by counting: 2,000,000 emulated ones, in log2 at a softmax scale of
# 192^-0.5, err by 3.0e-4 rms, one in 10^4 by more than 1.9e-3, one in 10^5 by 2.6e-3, the worst by
# 3.5e-3, or 0.7e-3 a decade: one in 10^8 by 4.7e-3. Errors scale with the softmax scale. Truncation
# pulls towards zero: by 2e-4 where the weights are. So an lse, the mean of its keys' errors by
# weight, is 1e-4 low for many keys, and stays within LSE_BOUND from 128 keys on (emulated: 1.3e-4
# rms, 7e-4 at worst of 6,250 rows at 0.06); of fewer keys one score can be all there is.
FP22_SCALE = 192**-0.5
FP22_SCORE_RMS = 3.0e-4
FP22_SCORE_MAX = 5e-3
FP22_MANY_KEYS = 128
# P from such a score is off by 2^error, 2e-4 rms: nothing beside the 0.0265 of its rounding, which
# NORM_BOUND is for. O is summed with the same 13 bits, 128 tokens at a time: at most 2.9e-4 of its
# norm (emulated, before P makes up for the least of its mean), against BF16's 1.66e-3.
# That changes 5 to 6.5 % of BF16's roundings.
FP22_OTHER_BITS = 0.05
# P all powers of two: exact in E4M3 and in FP32. What is left is the rounding to BF16, 1.5e-5 less
# than 2^-8 of the value, and a few FP32 roundings, together below 2^-8. log2 of an exact sum is
# good to 1e-4.
PROBE_REL = 2**-8
PROBE_LSE = 1e-4


def first_bad(bad: torch.Tensor) -> tuple[int, ...]:
    """Coordinate of the first true element."""
    return tuple(int(i) for i in bad.nonzero()[0])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers, on the CPU, so that NaN equals itself and 0 is not -0."""
    flat = tensor.detach().cpu().contiguous()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(kind)


def assert_bitwise(got: torch.Tensor, want: torch.Tensor, what: str = "tensors") -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape} against {want.shape}"
    differ = bits(got) != bits(want)
    if differ.any():
        at = first_bad(differ)
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} elements differ, first at {at}: "
            f"{got[at].item()!r} against {want[at].item()!r}"
        )


def assert_same(got: tuple[torch.Tensor, torch.Tensor], want: tuple, what: str = "") -> None:
    """Bitwise equality of two (out, lse) pairs."""
    assert_bitwise(got[0], want[0], f"out {what}")
    assert_bitwise(got[1], want[1], f"lse {what}")


def norm_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    size = want.norm().item()
    return (got - want).norm().item() / size if size > 0 else (got - want).norm().item()


def assert_empty_rows(out: torch.Tensor, lse: torch.Tensor, empty: torch.Tensor) -> None:
    """Rows that see no key are out = 0 and lse = -inf; no other row is, and nothing is NaN."""
    out, lse, empty = out.detach().cpu(), lse.detach().cpu(), empty.detach().cpu()
    assert not out.isnan().any(), f"out is NaN at {first_bad(out.isnan())}"
    assert not lse.isnan().any(), f"lse is NaN at {first_bad(lse.isnan())}"
    wrong = lse.isneginf() != empty
    assert not wrong.any(), (
        f"lse at {first_bad(wrong)} is {lse[first_bad(wrong)].item()}, "
        f"empty there: {bool(empty[first_bad(wrong)])}"
    )
    # Bits: a row of -0 would be a product of a masked weight, not a written zero.
    assert (bits(out[empty]) == 0).all(), "a row without keys is not exactly +0"


def assert_result(
    out: torch.Tensor,
    lse: torch.Tensor,
    ref_out: torch.Tensor,
    ref_lse: torch.Tensor,
    *,
    norm: float = NORM_BOUND,
    row: float = ROW_BOUND,
    lse_bound: float | torch.Tensor = LSE_BOUND,
) -> None:
    """Compares a result with a float64 one: empty rows, whole error norm, worst row, worst lse.
    `lse_bound` is one for all or [B, q, heads]."""
    out, lse = out.detach().cpu().double(), lse.detach().cpu().double()
    ref_out, ref_lse = ref_out.detach().cpu().double(), ref_lse.detach().cpu().double()
    assert out.shape == ref_out.shape
    assert lse.shape == ref_lse.shape
    empty = ref_lse.isneginf()
    assert_empty_rows(out.bfloat16(), lse, empty)
    if empty.all():
        return
    error = norm_error(out, ref_out)
    assert error <= norm, f"error norm {error:.5f} > {norm}"
    per_row = (out - ref_out).norm(dim=-1) / ref_out.norm(dim=-1).clamp_min(1e-30)
    per_row[empty] = 0.0
    bad = per_row > row
    assert not bad.any(), (
        f"row {first_bad(bad)}: error {per_row[first_bad(bad)].item():.5f} > {row}"
    )
    off = (lse - ref_lse).abs()
    off[empty] = 0.0
    bad = off > lse_bound
    assert not bad.any(), (
        f"lse at {first_bad(bad)}: {lse[first_bad(bad)].item()} against "
        f"{ref_lse[first_bad(bad)].item()}"
    )


def assert_probe(
    out: torch.Tensor,
    lse: torch.Tensor,
    ref_out: torch.Tensor,
    ref_lse: torch.Tensor,
    *,
    lse_bound: float = PROBE_LSE,
) -> None:
    """Elementwise comparison, for inputs whose P are powers of two."""
    out, lse = out.detach().cpu().double(), lse.detach().cpu().double()
    ref_out, ref_lse = ref_out.detach().cpu().double(), ref_lse.detach().cpu().double()
    empty = ref_lse.isneginf()
    assert_empty_rows(out.bfloat16(), lse, empty)
    bad = (out - ref_out).abs() > ref_out.abs() * PROBE_REL + 1e-30
    assert not bad.any(), (
        f"out at {first_bad(bad)}: {out[first_bad(bad)].item()} against "
        f"{ref_out[first_bad(bad)].item()}"
    )
    off = (lse - ref_lse).abs()
    off[empty] = 0.0
    bad = off > lse_bound
    assert not bad.any(), (
        f"lse at {first_bad(bad)}: {lse[first_bad(bad)].item()} against "
        f"{ref_lse[first_bad(bad)].item()}"
    )


def truth(
    batch: Batch, causal: bool = True, *, fp22: bool = False, on: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention of a batch, computed on the CPU or where it is asked for; with `fp22` from
    the scores that backend "sm90" has."""
    return reference.attention(
        batch.query.to(on),
        batch.cache.to(on),
        batch.block_table.to(on),
        batch.lengths.to(on),
        batch.scales,
        totals=None if batch.totals is None else batch.totals.to(on),
        cp=batch.cp,
        causal=causal,
        fp22=fp22,
    )


def fp22_score_error(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The most by which `reference.fp22_products` [rows, n] can differ from queries @ keys.T.

    A step loses less than a unit of each of its 33 numbers and one of their sum's units, 2^-13 of
    binades that the magnitudes bound: of the products by their factors, of the sums by the sum of
    all magnitudes. The panels' FP32 additions lose 2^-24 of that each.
    """
    sizes = [reference._binade(x).clamp_min(2.0**-6) * (x != 0) for x in (queries, keys)]
    error = queries.new_zeros(queries.shape[0], keys.shape[0])
    total = torch.zeros_like(error)
    for panel in range(0, 576, 128):
        held = torch.zeros_like(error)
        for step in range(panel, min(panel + 128, 576), 32):
            at = slice(step, step + 32)
            largest = (sizes[0][:, None, at] * sizes[1][:, at]).amax(dim=2)
            unit = torch.maximum(largest, reference._binade(held))
            held += queries[:, at].abs() @ keys[:, at].abs().T
            error += 2.0**-13 * (33 * unit + reference._binade(held))
        total += held
    return error + 5 * 2.0**-24 * total


def fp22_lse_bound(batch: Batch) -> torch.Tensor:
    """[B, q, heads]: what the lse of Gaussian data may be off by on backend "sm90"."""
    lengths = batch.lengths.tolist()
    totals = lengths if batch.totals is None else batch.totals.tolist()
    _, q, heads = batch.shape
    keys = torch.tensor(
        [
            reference.visible_keys(n, q, total=total, cp=batch.cp)
            for n, total in zip(lengths, totals, strict=True)
        ]
    )
    few = FP22_SCORE_MAX * batch.scales[0] / FP22_SCALE
    bound = torch.full(keys.shape, LSE_BOUND, dtype=torch.float64)
    bound[keys < FP22_MANY_KEYS] = max(few, LSE_BOUND)
    return bound.unsqueeze(-1).expand(-1, -1, heads)


def gaussian_bounds(batch: Batch) -> dict[str, float | torch.Tensor]:
    """`norm` and `lse_bound` of assert_result for Gaussian data of any shape on its device.

    NORM_BOUND is of a mean over rows. A row's squared error scatters by about its mean, 0.0215^2
    where that is largest, so the mean over 16 rows stays below NORM_BOUND^2 by 3.5 standard errors;
    for fewer rows no more is known than for one.
    """
    b, q, heads = batch.shape
    return {
        "norm": NORM_BOUND if b * q * heads >= 16 else ROW_BOUND,
        "lse_bound": fp22_lse_bound(batch) if has_fp22_scores(batch.query.device) else LSE_BOUND,
    }


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges (out, log2 lse) of disjoint key sets in float64, as a caller of DCP does."""
    outs = torch.stack([out.cpu().double() for out, _ in parts])
    lses = torch.stack([lse.cpu().double() for _, lse in parts])
    top = lses.amax(0)
    weights = torch.exp2(lses - top.nan_to_num(neginf=0.0))
    total = weights.sum(0)
    out = (weights.unsqueeze(-1) * outs).sum(0) / total.clamp_min(1e-300).unsqueeze(-1)
    return out, torch.where(total > 0, top + total.clamp_min(1e-300).log2(), -math.inf)
