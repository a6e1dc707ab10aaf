# SPDX-License-Identifier: Apache-2.0
"""The arithmetic: the float64 definition, the E4M3 rounding of P and its growth rule, scales,
p_scale, FP16 partials, and the model of it all that kbmla.reference states."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    FP8,
    LOG2E,
    TILE,
    Batch,
    backend_on,
    core_for,
    decode,
    has_fp22_scores,
    make_batch,
    manual_plan,
    probe_batch,
    probe_query,
    probe_rows,
)
from compare import (
    BF16_NORM,
    FP22_OTHER_BITS,
    FP22_SCALE,
    FP22_SCORE_MAX,
    NORM_BOUND,
    assert_probe,
    assert_result,
    bits,
    norm_error,
    truth,
)

from kbmla import reference
from kbmla.core import P_SCALE

P_SCALES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]


def model(batch: Batch, counts: list[int], p_scale: float = 1.0):
    """What kbmla.reference says decode computes on the batch's backend: its scores, its steps and
    the E4M3 rounding of P."""
    device = batch.query.device
    return reference.e4m3_model(
        batch.query.cpu(),
        batch.cache.cpu(),
        batch.block_table.cpu(),
        batch.lengths.cpu(),
        batch.scales,
        counts=torch.tensor(counts, dtype=torch.int32),
        p_scale=p_scale,
        step=reference.STEP_TOKENS[backend_on(device)],
        fp22=has_fp22_scores(device),
    )


# ---------------------------------------------------------------------------- the definition


@pytest.mark.parametrize("cp", [(1, 0, 1), (3, 1, 2)])
def test_reference_is_attention(cp):
    """kbmla.reference.attention against a loop over rows and keys that shares nothing with it."""
    totals = [7, 0, 2]
    world, rank, interleave = cp
    held = [[i for i in range(n) if (i // interleave) % world == rank] for n in totals]
    batch = make_batch(
        [len(h) for h in held],
        2,
        3,
        page=2,
        seed=2,
        totals=totals if world > 1 else None,
        cp=cp,
        scales=(0.1, 0.5),
    )
    out, lse = truth(batch)
    for b, total in enumerate(totals):
        for t in range(3):
            keys = [j for j, i in enumerate(held[b]) if i <= total - 3 + t]
            for h in range(2):
                query = batch.query[b, t, h].double()
                weights = [math.exp(0.1 * float(query @ batch.rows[b][j].double())) for j in keys]
                if not keys:
                    assert lse[b, t, h] == -math.inf
                    assert (out[b, t, h] == 0).all()
                    continue
                want = sum(
                    w * batch.rows[b][j, :512].double() for w, j in zip(weights, keys, strict=True)
                )
                assert torch.allclose(out[b, t, h], want / sum(weights) * 0.5, atol=1e-9)
                assert abs(lse[b, t, h].item() - math.log2(sum(weights))) < 1e-9


def test_reference_ignores_poison():
    """NaN in unused bytes reaches no float64 result, so the truth of every test is a truth."""
    out, lse = truth(make_batch([13, 0, 65, 200], 4, 2, seed=3))
    clean = truth(make_batch([13, 0, 65, 200], 4, 2, seed=3, poison=0, unused=0))
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])


# ---------------------------------------------------------------------------- the model of P


@pytest.mark.parametrize("p_scale", P_SCALES)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("heads", [16, 24, 32])
def test_against_the_model_of_p(device, p_scale, count, heads):
    """With the same scores, tiles, splits and growth rule only FP32 order is left: a P falls on the
    other side of an E4M3 tie about once in 10^5, so the results differ by the rounding to BF16. A
    fifth more holds the rare flip, and what sm90 loses of V^T P^T (FP22_OTHER_BITS) three times."""
    batch = make_batch([900, 130, 2], heads, 2, device=device, seed=int(p_scale) + count)
    core = core_for(batch, p_scale=p_scale)
    counts = manual_plan(core, batch.lengths, count)[0].tolist()
    out, lse = decode(core, batch, count)
    model_out, model_lse = model(batch, counts, p_scale)
    assert norm_error(out, model_out) < 1.2 * BF16_NORM
    assert (lse.cpu().double() - model_lse.cpu().double()).abs().max() < 1e-5
    # Far from the truth by comparison: the model explains the error, not just bounds it.
    assert norm_error(out[0], truth(batch)[0][0]) > 2 * norm_error(out[0], model_out[0])


def test_the_model_explains_most_bits(device):
    """Rounded to BF16 the model gives the same element nearly always; FP22_OTHER_BITS says what
    sm90's sums add."""
    batch = make_batch([2000], 32, 1, device=device, seed=5)
    core = core_for(batch)
    out, _ = decode(core, batch, 4)
    model_out, _ = model(batch, manual_plan(core, batch.lengths, 4)[0].tolist())
    differ = bits(out) != bits(model_out.bfloat16())
    assert differ.double().mean() < 0.05 + FP22_OTHER_BITS * has_fp22_scores(device)


@pytest.mark.parametrize("spread", [0.25, 1.0, 4.0, 16.0])
def test_spread_of_the_scores(device, spread):
    """From nearly equal weights to nearly one-hot rows. A score's error grows with the scale: sm90
    is held to the usual bounds against its own scores, to a score's error against exact ones."""
    batch = make_batch([1500, 200], 16, 2, device=device, seed=6, scales=(0.06 * spread, 1.0))
    fp22 = has_fp22_scores(device)
    got = decode(core_for(batch), batch)
    # A one-hot row that two keys share shows one rounding of P; see ROW_BOUND.
    assert_result(*got, *truth(batch, fp22=fp22), norm=2 * NORM_BOUND)
    if fp22:
        off = (got[1].cpu() - truth(batch)[1]).abs().max()
        assert off < FP22_SCORE_MAX * batch.scales[0] / FP22_SCALE


# ---------------------------------------------------------------------------- growth of the max


def needles(steps: list[float], scale_of_step: float) -> Batch:
    """One needle per tile, its log2 score steps[j], among keys 208 below; v = 1 everywhere."""
    n = TILE * len(steps)
    r = torch.full((n,), -416.0)
    for j, step in enumerate(steps):
        r[j * TILE + 5] = step
    rows = probe_rows(r, torch.ones(n, 512))
    return probe_batch([rows], 16, 1, a=4.0, softmax=scale_of_step)


@pytest.mark.parametrize("step", [7.9, 8.0, 8.1, 12.0])
@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("p_scale", [1.0, 16.0, 256.0])
def test_maxima_that_rise_tile_by_tile(device, step, falling, count, p_scale):
    """flash-attention#2577, #2713, #2131: the retained max lets P grow to 256 at most, so nothing
    saturates; v = 1 makes the output 1 but for the rounding of P (2^-4 of the weights that are not
    the top one, and the top one's own: together below 2^-5 here, as one needle outweighs the rest
    by 2^step)."""
    heights = [16.0 * j for j in range(6)]
    batch = needles(heights[::-1] if falling else heights, step / 64 / LOG2E)
    batch = Batch(
        batch.query.to(device),
        batch.cache.to(device),
        batch.block_table.to(device),
        batch.lengths.to(device),
        batch.rows,
        batch.scales,
    )
    out, lse = decode(core_for(batch, p_scale=p_scale), batch, count)
    ref_out, ref_lse = truth(batch)
    assert (ref_out - 1).abs().max() < 1e-9
    assert (out.cpu().double() - 1).abs().max() <= 2**-5
    assert (lse.cpu() - ref_lse).abs().max() < 1e-3


@pytest.mark.parametrize("p_scale", P_SCALES)
def test_growth_allowance(device, p_scale):
    """At the edge of the allowance P is p_scale * 2^(8 - log2 p_scale) = 256, stored exactly; one
    step beyond, the max moves. Either way powers of two stay exact."""
    allowance = 8 - round(math.log2(p_scale))
    for grow in (allowance, allowance + 1, 1):
        r = torch.zeros(2 * TILE)
        r[:TILE] = -8.0 * grow
        rows = probe_rows(r, torch.cat([torch.ones(TILE, 512) * 2, torch.ones(TILE, 512) * 4]))
        batch = probe_batch([rows], 8, 1, a=1.0, softmax=math.log(2) / 8, device=device)
        assert_probe(*decode(core_for(batch, p_scale=p_scale), batch, 1), *truth(batch))


@pytest.mark.parametrize("log2_p_scale", [0, 2, 4, 6])
def test_growth_allowance_is_inclusive(device, log2_p_scale):
    """A maximum that grew by exactly 8 - log2(p_scale) is kept, by one more it is not. What tells:
    keys of the second tile whose P is E4M3's least number, 2^-9, under the kept maximum and rounds
    to zero under the new one."""
    weak = -9 - log2_p_scale
    for grow, kept in ((8 - log2_p_scale, True), (9 - log2_p_scale, False)):
        r = torch.zeros(2 * TILE)
        r[TILE] = 8.0 * grow
        r[TILE + 1 :] = 8.0 * weak
        v = torch.zeros(2 * TILE, 512)
        v[TILE + 1 :] = 1.0
        batch = probe_batch([probe_rows(r, v)], 8, 1, a=1.0, softmax=math.log(2) / 8, device=device)
        out, _ = decode(core_for(batch, p_scale=2.0**log2_p_scale), batch, 1)
        ref_out, _ = truth(batch)
        want = ref_out if kept else torch.zeros_like(ref_out)
        assert ((out.cpu().double() - want).abs() <= want * 2**-8).all(), grow


# ---------------------------------------------------------------------------- weak keys


def sink_batch(cold: float, device, keys: int = 8191) -> Batch:
    """A hot key of score 0 at token 0, then cold keys; v = 1 for the cold ones in channel 0."""
    r = torch.full((keys + 1,), cold)
    r[0] = 0.0
    v = torch.zeros(keys + 1, 512)
    v[1:, 0] = 1.0
    return probe_batch([probe_rows(r, v)], 8, 1, a=1.0, softmax=math.log(2) / 8, device=device)


@pytest.mark.parametrize("count", [1, 4, 64])
def test_stock_precision_loses_weak_keys(device, count):
    """flashinfer#5020, FlyDSL#1020: 2^-11 rounds to zero as E4M3 beside a key of weight 1. The LSE
    is exact, the output is what the model of P says for that split count: each split without the
    hot key keeps its cold ones."""
    batch = sink_batch(-88.0, device)
    core = core_for(batch)
    counts = manual_plan(core, batch.lengths, count)[0].tolist()
    out, lse = decode(core, batch, count)
    total = 1 + 8191 * 2.0**-11
    assert (lse.cpu() - math.log2(total)).abs().max() < 1e-4
    first = min(-(-64 // count) * TILE, 8192) - 1  # cold keys that share a split with the hot one
    want = (8191 - first) * 2.0**-11 / total
    got = out[..., 0].cpu().double()
    assert (got - want).abs().max() <= want * 2**-8
    assert (got - model(batch, counts)[0][..., 0]).abs().max() <= 2**-8
    if count == 1:
        assert (got == 0).all()


@pytest.mark.parametrize("p_scale", [2.0, 4.0, 16.0, 64.0, 256.0])
@pytest.mark.parametrize("count", [1, 4, 64])
def test_p_scale_keeps_weak_keys(device, p_scale, count):
    """The cure of flashinfer#5020: scaled by 2 or more, 2^-11 is stored, and whole, as a power of
    two at or above E4M3's least (2^-9) once p_scale >= 4. 2 * 2^-11 = 2^-10 is the tie between
    zero and 2^-9, which goes to the even zero, and on sm90 up (FP22_LEAST_CUT)."""
    batch = sink_batch(-88.0, device)
    out, lse = decode(core_for(batch, p_scale=p_scale), batch, count)
    reference_out, reference_lse = truth(batch)
    assert (lse.cpu() - reference_lse).abs().max() < 1e-4
    got, want = out[..., 0].cpu().double(), reference_out[..., 0]
    if p_scale >= 4:
        assert (got - want).abs().max() <= want.max() * 2**-8
    else:
        counts = manual_plan(core_for(batch), batch.lengths, count)[0].tolist()
        assert (got - model(batch, counts, p_scale)[0][..., 0]).abs().max() <= 2**-8


@pytest.mark.parametrize("count", [1, 4, 64])
def test_keys_at_the_edge_are_kept(device, count):
    """flashinfer#5020: at 2^-9, E4M3's least subnormal, stock precision loses nothing."""
    batch = sink_batch(-72.0, device)
    out, lse = decode(core_for(batch), batch, count)
    assert (lse.cpu() - 4.0873).abs().max() < 1e-3
    assert (out[..., 0].cpu().double() - 0.94117).abs().max() <= 0.94117 * 2**-8


@pytest.mark.parametrize("p_scale", P_SCALES)
def test_p_scale_stays_within_the_bounds(device, p_scale):
    batch = make_batch([3000, 0, 130], 16, 2, device=device, seed=7)
    core = core_for(batch, p_scale=p_scale)
    for plan in (None, 1, 7):
        assert_result(*decode(core, batch, plan), *truth(batch))


@pytest.mark.parametrize("length", [64, 129, 300, 513, 1000, 2048, 9000])
def test_default_precision(device, length):
    """What BalancedMla takes by itself stays within 2 percent on Gaussian requests of any length:
    its row maximum is always exact, and the strongest key with it. Stock does not (NORM_BOUND)."""
    batch = make_batch([length] * 2, 64, 1, device=device, seed=length)
    core = core_for(batch, p_scale=P_SCALE)
    for count in (1, 2, 8):
        assert_result(*decode(core, batch, count), *truth(batch), norm=0.02)


# ---------------------------------------------------------------------------- scales


def test_scales(device):
    """vllm#37054, sglang#34765, sglang#18396: one scale for keys, one for the output, each applied
    once."""
    batch = make_batch([500, 130], 16, 2, device=device, seed=8, scales=(0.06, 1.0))
    core = core_for(batch)
    out, lse = decode(core, batch, 3)
    batch.scales = (0.06, 2.0)
    twice, same_lse = decode(core, batch, 3)
    # A power of two commutes with every rounding.
    assert torch.equal(twice.float(), out.float() * 2)
    assert torch.equal(same_lse, lse)
    batch.scales = (0.12, 1.0)
    assert_result(*decode(core, batch, 3), *truth(batch))


def test_halved_cache_with_doubled_scales(device):
    """vllm#37054: cache / 2 with twice both scales is the same attention, bit for bit."""
    g = torch.Generator().manual_seed(9)
    # Sixteenths from 1/4 up: halving them stays clear of E4M3's subnormals.
    values = torch.randint(4, 16, (400, 576), generator=g) / 16.0
    signs = torch.randint(0, 2, (400, 576), generator=g) * 2 - 1
    whole = (values * signs).to(FP8)
    half = (whole.float() / 2).to(FP8)
    assert torch.equal(half.float() * 2, whole.float())
    results = []
    for rows, factor in ((whole, 1.0), (half, 2.0)):
        batch = make_batch(
            [400], 16, 1, rows=[rows], device=device, seed=9, scales=(0.06 * factor, factor)
        )
        results.append(decode(core_for(batch), batch, 2))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 0.5, 3.0, 448.0, 1e30])
def test_output_scale(device, scale):
    v = torch.arange(512).float() % 7 - 3
    batch = probe_batch([probe_rows(1.0, v.expand(9, 512), 9)], 4, 1, a=0.0, device=device)
    batch.scales = (1.0, scale)
    assert_probe(*decode(core_for(batch), batch), *truth(batch))


# ---------------------------------------------------------------------------- partials


@pytest.mark.parametrize("count", [2, 5, 40])
def test_fp16_partials(device, count):
    """FP16 partials add 2^-11 per split, far below the rounding of P."""
    batch = make_batch([5000, 300], 96, 2, device=device, seed=10)
    full, half = core_for(batch), core_for(batch, partial_fp16=True)
    assert half.workspace_bytes < full.workspace_bytes
    base = decode(full, batch, count)
    got = decode(half, batch, count)
    assert_result(*got, *truth(batch))
    # 2^-11 from the partials and one more BF16 rounding where it tips one.
    assert norm_error(got[0], base[0]) < 2**-9
    assert torch.equal(got[1], base[1])


def test_partials_do_not_carry_the_output_scale(device):
    """A scale that would overflow FP16 acts after the merge only."""
    batch = make_batch([2000], 16, 1, device=device, seed=11, scales=(0.06, 1e6))
    core = core_for(batch, partial_fp16=True)
    assert_result(*decode(core, batch, 6), *truth(batch))


def test_largest_values(device):
    """Keys and values at E4M3's 448 with equal weights: sums of 10^4 of them stay exact."""
    rows = [probe_rows(0.0, torch.full((512,), 448.0), n) for n in (20_000, 3)]
    batch = probe_batch(rows, 8, 1, device=device)
    for count in (1, 8):
        assert_probe(*decode(core_for(batch), batch, count), *truth(batch))


@pytest.mark.parametrize("position", [0, 2047, 4095])
@pytest.mark.parametrize("count", [1, 2, 3, 32])
def test_logits_of_two_thousand(device, position, count):
    """cutlass#2274, sglang#6101, vllm#17745: logits of +-2048 need a max in every exponent."""
    r = torch.full((4096,), -64.0)
    r[position] = 64.0
    v = torch.full((4096, 512), -1.0)
    v[position] = 3.0
    batch = make_batch(
        [4096],
        rows=[probe_rows(r, v)],
        query=probe_query(1, 1, 16, 256.0),
        scales=(1 / 8, 1.0),
        device=device,
    )
    out, lse = decode(core_for(batch), batch, count)
    assert (out == 3.0).all()
    # 2048 * log2(e); FP32 keeps steps of 2^-12 there.
    assert (lse.cpu() - 2048 * LOG2E).abs().max() < 1e-3


@pytest.mark.parametrize("score", [1e5, 1.3e7])
def test_a_dominant_key_is_exact_at_huge_scores(device, score):
    """Raw scores to 1.3e7 at the models' own scale: one key far above all others has P = 1, and its
    value comes out as it is. Scores scaled before the maximum is taken off would lose per cents."""
    length, scale = 300, 192**-0.5
    level = min(448.0, (score / 64) ** 0.5 // 16 * 16)
    rows = torch.zeros(length, 576)
    rows[:, :512] = torch.linspace(-2, 2, 512)
    rows[:, 512:] = -level
    rows[170, 512:] = level
    rows[170, :512] = torch.linspace(1, 3, 512)
    query = torch.zeros(1, 1, 16, 576)
    query[..., 512:] = level
    fp8 = torch.float8_e4m3fn
    batch = make_batch(
        [length],
        16,
        1,
        device=device,
        rows=[rows.to(fp8)],
        query=query.to(fp8),
        scales=(scale, 1.0),
    )
    for count in (1, 3):
        out, _ = decode(core_for(batch, p_scale=P_SCALE), batch, count)
        value = batch.rows[0][170, :512].float().bfloat16()
        assert torch.equal(out[0, 0, 0].cpu(), value)


@pytest.mark.parametrize("count", [1, 2])
def test_largest_softmax_scale(device, count):
    """The largest scale that is accepted leaves the largest score finite, split or whole; a larger
    one is refused."""
    rows = torch.full((400, 576), 448.0).to(torch.float8_e4m3fn)
    query = torch.full((1, 1, 16, 576), -448.0).to(torch.float8_e4m3fn)
    batch = make_batch([400], 16, 1, device=device, rows=[rows], query=query, scales=(2.0e30, 1.0))
    out, lse = decode(core_for(batch), batch, count)
    assert (out == 448).all()
    assert torch.isfinite(lse).all()
    batch.scales = (2.1e30, 1.0)
    with pytest.raises(ValueError, match="softmax_scale"):
        decode(core_for(batch), batch, count)
