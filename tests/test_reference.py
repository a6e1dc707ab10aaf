# SPDX-License-Identifier: Apache-2.0
"""The float64 reference against closed forms and against itself in other arrangements."""

import math
import re
from pathlib import Path

import pytest
import torch
from compare import FP22_SCALE, FP22_SCORE_MAX, FP22_SCORE_RMS, fp22_score_error

from kbmla import reference, workloads

SCALES = (0.07, 1.5)


def call(function, batch, scales=SCALES, **options):
    return function(batch.query, batch.cache, batch.block_table, batch.lengths, scales, **options)


def relative(a, b):
    return float((a - b).norm() / b.norm())


def direct(batch, b, t, h, visible, scales=SCALES):
    """One row by the book: natural exponentials of one dense matrix."""
    page = batch.cache.shape[1]
    token = torch.arange(visible)
    rows = batch.cache.view(torch.uint8)[batch.block_table[b, token // page].long(), token % page]
    rows = rows.view(torch.float8_e4m3fn).double()
    s = rows @ batch.query[b, t, h].double() * scales[0]
    p = torch.exp(s - s.max())
    return p @ rows[:, :512] / p.sum() * scales[1], (s.max() + p.sum().log()) / math.log(2)


# ---------------------------------------------------------------- masks


def test_local_length_counts_owned_tokens():
    for world, interleave in [(1, 1), (2, 1), (3, 4), (4, 64)]:
        owner = [(i // interleave) % world for i in range(600)]
        for rank in range(world):
            for total in (0, 1, 63, 64, 65, 599, 600):
                expected = owner[:total].count(rank)
                assert reference.local_length(total, (world, rank, interleave)) == expected


@pytest.mark.parametrize(
    ("length", "q", "expected"),
    [(5, 1, [5]), (5, 3, [3, 4, 5]), (2, 4, [0, 0, 1, 2]), (0, 2, [0, 0]), (-7, 1, [0])],
)
def test_visible_keys(length, q, expected):
    assert reference.visible_keys(length, q) == expected
    assert reference.visible_keys(length, q, causal=False) == [max(length, 0)] * q


def test_visible_keys_are_global_positions():
    # Tokens 0..9 on two ranks in pairs: rank 1 holds 2 3 6 7.
    assert reference.visible_keys(4, 4, total=10, cp=(2, 1, 2)) == [3, 4, 4, 4]


# ---------------------------------------------------------------- exact result


@pytest.mark.parametrize("page", [1, 64])
def test_attention_row_by_row(page):
    batch = workloads.paged_cache([300, 2, 0, 129], page, q=3, heads=4)
    out, lse = call(reference.attention, batch)
    assert out.dtype == lse.dtype == torch.float64
    for b, length in enumerate([300, 2, 0, 129]):
        for t in range(3):
            visible = length - 2 + t
            if visible <= 0:
                assert (out[b, t] == 0).all()
                assert lse[b, t].isneginf().all()
                continue
            row, row_lse = direct(batch, b, t, 2, visible)
            torch.testing.assert_close(out[b, t, 2], row)
            torch.testing.assert_close(lse[b, t, 2], row_lse)


def test_attention_in_chunks(monkeypatch):
    batch = workloads.paged_cache([1000], 64, q=2, heads=2)
    whole = call(reference.attention, batch)
    monkeypatch.setattr(reference, "_CHUNK_TOKENS", 100)
    torch.testing.assert_close(call(reference.attention, batch), whole)
    model = call(reference.e4m3_model, batch)
    monkeypatch.setattr(reference, "_CHUNK_TOKENS", 10**6)
    torch.testing.assert_close(call(reference.e4m3_model, batch), model)


def test_huge_scores_stay_finite():
    batch = workloads.paged_cache([200], 64, heads=2)
    for function in (reference.attention, reference.e4m3_model):
        out, lse = call(function, batch, (1e6, 1.0))
        assert out.isfinite().all()
        assert lse.isfinite().all()


def test_a_strided_cache_and_query():
    batch = workloads.paged_cache([100, 70], 16, q=2, heads=3)
    wide = torch.zeros(batch.cache.shape[0], 20, 600, dtype=torch.uint8)
    wide[:, :16, :576] = batch.cache.view(torch.uint8)
    cache = wide.view(torch.float8_e4m3fn)[:, :16, :576]
    got = reference.attention(
        batch.query[:, :, :2], cache, batch.block_table, batch.lengths, SCALES
    )
    expected = call(reference.attention, batch)
    torch.testing.assert_close(got, tuple(x[:, :, :2] for x in expected))


# ---------------------------------------------------------------- merge


def test_merge_is_the_softmax_over_the_union():
    torch.manual_seed(0)
    s, v = torch.randn(3, 50, dtype=torch.float64), torch.randn(50, 512, dtype=torch.float64)
    parts = [(0, 7), (7, 8), (8, 50)]
    ln2 = math.log(2)
    outs = [torch.softmax(s[:, a:b], 1) @ v[a:b] for a, b in parts]
    lses = [torch.logsumexp(s[:, a:b], 1) / ln2 for a, b in parts]
    out, lse = reference.merge(outs, lses)
    torch.testing.assert_close(out, torch.softmax(s, 1) @ v)
    torch.testing.assert_close(lse, torch.logsumexp(s, 1) / ln2)
    torch.testing.assert_close(reference.merge(torch.stack(outs), torch.stack(lses))[0], out)


def test_merge_skips_empty_results():
    nan, inf = torch.full((2, 512), math.nan), math.inf
    full = torch.ones(2, 512)
    out, lse = reference.merge([nan, full], [torch.tensor([-inf, -inf]), torch.tensor([3.0, -inf])])
    assert (out[0] == 1).all()
    assert (out[1] == 0).all()
    assert lse.tolist() == [3.0, -inf]


def test_merge_refuses():
    with pytest.raises(ValueError, match="outs, lses"):
        reference.merge([], [])
    with pytest.raises(ValueError, match="outs, lses"):
        reference.merge([torch.zeros(2, 512)], [torch.zeros(3)])


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 16)])
@pytest.mark.parametrize("function", [reference.attention, reference.e4m3_model])
def test_ranks_merge_to_the_whole(function, world, interleave):
    totals, q = [300, 2, 0, 65], 3
    whole = workloads.paged_cache(totals, 1, q=q, heads=4, poison=False)
    expected, expected_lse = call(reference.attention, whole)
    outs, lses = [], []
    for rank in range(world):
        mine = [[i for i in range(n) if i // interleave % world == rank] for n in totals]
        table = torch.full((len(totals), 310), workloads.HUGE_PAGE, dtype=torch.int32)
        for b, tokens in enumerate(mine):
            table[b, : len(tokens)] = whole.block_table[b, tokens]
        out, lse = function(
            whole.query, whole.cache, table, torch.tensor([len(t) for t in mine]), SCALES,
            totals=torch.tensor(totals), cp=(world, rank, interleave),
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    out, lse = reference.merge(outs, lses)
    torch.testing.assert_close(lse, expected_lse)
    assert relative(out, expected) < (1e-12 if function is reference.attention else 0.02)


# ---------------------------------------------------------------- E4M3 model


@pytest.mark.parametrize("counts", [None, [3, 1, 2, 9]])
def test_model_is_near_and_its_lse_exact(counts):
    batch = workloads.paged_cache([1500, 2, 0, 129], 64, q=2, heads=4)
    expected, expected_lse = call(reference.attention, batch)
    counts = None if counts is None else torch.tensor(counts, dtype=torch.int32)
    out, lse = call(reference.e4m3_model, batch, counts=counts)
    torch.testing.assert_close(lse, expected_lse)
    assert 1e-4 < relative(out, expected) < 0.02


def test_model_with_powers_of_two_is_exact():
    batch = workloads.paged_cache([777], 64, heads=2)
    zero = batch.query.view(torch.uint8).zero_().view(torch.float8_e4m3fn)
    out, lse = reference.e4m3_model(zero, batch.cache, batch.block_table, batch.lengths, SCALES)
    torch.testing.assert_close(out, call(reference.attention, batch)[0])
    assert lse.flatten().tolist() == pytest.approx([math.log2(777)] * 2)


def sink_batch(gap):
    """129 keys: the first scores 0, the last (a tile of its own) `gap` in base-2 units."""
    batch = workloads.paged_cache([129], 1, heads=1, poison=False)
    keys = torch.zeros(129, 576)
    keys[:, 0] = 1.0
    keys[1:128, 575] = -16.0
    keys[128, 574], keys[128, 0] = 1.0, 4.0
    query = torch.zeros(1, 1, 1, 576)
    query[..., 574] = gap
    query[..., 575] = 16.0
    cache = batch.cache.clone()
    cache[batch.block_table[0, :129].long(), 0] = keys.to(torch.float8_e4m3fn)
    return query.to(torch.float8_e4m3fn), cache, batch.block_table, batch.lengths


@pytest.mark.parametrize(
    ("gap", "p_scale", "kept"),
    [(8, 1.0, True), (9, 1.0, False), (4, 16.0, True), (4.5, 16.0, False)],
)
def test_maximum_is_kept_up_to_the_allowance(monkeypatch, gap, p_scale, kept):
    """Inclusive at 8 - log2(p_scale): the probability of the last key tells which maximum ruled."""
    stored = []

    def spy(values):
        stored.append(float(values[0, 128]))
        return values

    monkeypatch.setattr(reference, "_e4m3", spy)
    scales = (math.log(2), 1.0)
    _, lse = reference.e4m3_model(*sink_batch(gap), scales, p_scale=p_scale)
    assert stored[0] == pytest.approx(p_scale * (2.0**gap if kept else 1.0))
    assert float(lse) == pytest.approx(math.log2(1 + 2.0**gap))


def test_rounding_saturates_and_goes_to_even():
    values = torch.tensor([1e9, 449.0, 1.0625, 1.1875, 2.0**-10, 2.0**-9], dtype=torch.float64)
    expected = [448.0, 448.0, 1.0, 1.25, 0.0, 2.0**-9]
    assert reference._e4m3(values).tolist() == expected


@pytest.mark.parametrize("tiles", [0, 1, 7, 300, 1000])
@pytest.mark.parametrize("count", [0, 1, 5, 8, 256, 999])
def test_splits_cover_each_tile_once(tiles, count):
    ranges = reference._split_ranges(tiles, count)
    assert [t for a, b in ranges for t in range(a, b)] == list(range(tiles))
    assert len(ranges) <= max(1, min(count, tiles, 256))
    assert tiles == 0 or all(a < b for a, b in ranges)


# ---------------------------------------------------------------- FP22 scores


def channels(values):
    """[1, 576] float64 with the given channels set."""
    row = torch.zeros(1, 576, dtype=torch.float64)
    for channel, value in values.items():
        row[0, channel] = value
    return row


@pytest.mark.parametrize("sign", [1, -1])
def test_what_fp22_loses(sign):
    """2^-14 beside 1: in the same step and in the same panel lost, in another panel kept."""
    small = sign * 2.0**-9
    for at, want in ((1, 1.0), (127, 1.0), (128, 1 + sign * 2.0**-14), (575, 1 + sign * 2.0**-14)):
        query, key = channels({0: 1.0, at: 2.0**-5}), channels({0: 1.0, at: small})
        assert reference.fp22_products(query, key).item() == want, at
    # A subnormal factor counts as 2^-6: this product as 2^-2, and 2^-16 is below 2^-2 * 2^-13.
    query, key = channels({0: 16.0, 1: 2.0**-7}), channels({0: 2.0**-9, 1: 2.0**-9})
    assert reference.fp22_products(query, key).item() == 2.0**-5


def fp22_by_the_book(query, key):
    """One score in plain Python, exponents as integers."""

    def exponent(x):
        return math.frexp(x)[1] - 1

    def cut(x, unit):
        return math.trunc(x / unit) * unit

    total = 0.0
    for panel in (range(a, min(a + 128, 576), 32) for a in range(0, 576, 128)):
        held = 0.0
        for step in panel:
            pairs = [
                (a, b)
                for a, b in zip(query[step : step + 32], key[step : step + 32], strict=True)
                if a * b
            ]
            tops = [max(exponent(a), -6) + max(exponent(b), -6) for a, b in pairs]
            tops += [exponent(held)] if held else []
            if not tops:
                continue
            unit = 2.0 ** (max(tops) - 13)
            held = cut(held, unit) + sum(cut(a * b, unit) for a, b in pairs)
            held = cut(held, 2.0 ** (exponent(held) - 13)) if held else 0.0
        total += held
    return total


def e4m3(x):
    return x.to(torch.float8_e4m3fn).double()


@pytest.mark.parametrize("kind", ["gaussian", "aligned", "wide", "largest", "small"])
def test_fp22_products(kind):
    """Against the rule in plain Python, and never further from the exact sum than the bound."""
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(n, 576, generator=g, dtype=torch.float64) for n in (6, 40))
    if kind == "aligned":
        k[:6] = q
    elif kind == "wide":
        q, k = (x * torch.exp2(torch.randint(-7, 7, x.shape, generator=g).double()) for x in (q, k))
    elif kind == "largest":
        q, k = q.sign() * 448, k.sign() * 448
    elif kind == "small":
        q, k = q * 2.0**-6, k * 2.0**-6
    q, k = e4m3(q.clamp(-448, 448)), e4m3(k.clamp(-448, 448))
    got = reference.fp22_products(q, k)
    want = [[fp22_by_the_book(a, b) for b in k.tolist()] for a in q.tolist()]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-7, atol=0)
    error = (got - q @ k.T).abs()
    assert (error <= fp22_score_error(q, k)).all()


def test_fp22_errors_of_gaussian_scores():
    """The figures that the tolerances of tests/compare.py rest on."""
    g = torch.Generator().manual_seed(4)
    q, k = (e4m3(torch.randn(n, 576, generator=g)) for n in (400, 320))
    error = (reference.fp22_products(q, k) - q @ k.T) * (FP22_SCALE * math.log2(math.e))
    assert error.square().mean().sqrt() == pytest.approx(FP22_SCORE_RMS, rel=0.05)
    assert error.abs().max() < FP22_SCORE_MAX
    assert error.mean().abs() < 0.02 * FP22_SCORE_RMS


@pytest.mark.parametrize("function", [reference.attention, reference.e4m3_model])
def test_results_from_fp22_scores(function, monkeypatch):
    """They move an lse a little, ignore poison, and do not depend on what is computed at once."""
    batch = workloads.paged_cache([700, 2, 0], 16, q=2, heads=4)
    got = call(function, batch, fp22=True)
    off = (got[1] - call(function, batch)[1])[got[1].isfinite()]
    assert 1e-5 < off.abs().max() < FP22_SCORE_MAX
    assert got[0].isfinite().all()
    monkeypatch.setattr(reference, "_FP22_CHUNK_PAIRS", 1000)
    torch.testing.assert_close(call(function, batch, fp22=True), got)


@pytest.mark.parametrize(("below_tie", "rounded"), [(1e-4, 0.5625), (4e-4, 0.5), (None, 0.5)])
def test_what_p_makes_up_for(below_tie, rounded):
    """With fp22 P rounds as if it were FP22_LEAST_CUT larger; what E4M3 holds stays, and no sum."""
    batch = workloads.paged_cache([2], 16, q=1, heads=1)
    p = 0.5 if below_tie is None else 0.53125 * (1 - below_tie)
    rows = torch.zeros(2, 576)
    rows[1, :512] = 1.0
    rows[1, -1] = -1.0
    batch.cache[batch.block_table[0, 0], :2] = rows.to(batch.cache.dtype)
    batch.query.copy_(torch.zeros(576).index_fill(0, torch.tensor(575), 1.0))
    for fp22, stored in ((True, rounded), (False, 0.5)):
        out, lse = call(reference.e4m3_model, batch, (-math.log(p), 1.0), fp22=fp22)
        assert out[0, 0, 0, 0].item() == pytest.approx(stored / (1 + p), rel=1e-12)
        assert lse.item() == pytest.approx(math.log2(1 + p), rel=1e-12)


def test_the_kernel_makes_up_for_the_same():
    source = Path(__file__).parents[1] / "csrc/sm90/sm90_softmax.cuh"
    if not source.exists():
        pytest.skip("no csrc/ beside the tests")
    written = re.search(r"#define LEAST_CUT (\S+)f\n", source.read_text("utf-8"))
    assert float(written[1]) == reference.FP22_LEAST_CUT


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("function", [reference.attention, reference.e4m3_model])
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"cp": (2, 0, 1)}, "totals"),
        ({"cp": (2, 2, 1)}, "cp"),
        ({"cp": (1, 0, 0)}, "cp"),
        ({"totals": torch.zeros(5), "cp": (2, 0, 1)}, "totals"),
    ],
)
def test_bad_arguments_are_named(function, options, name):
    with pytest.raises(ValueError, match=name):
        call(function, workloads.paged_cache([5, 6], 64), **options)


def test_model_refuses():
    batch = workloads.paged_cache([5, 6], 64)
    for p_scale in (0.0, 3.0, 512.0, math.nan):
        with pytest.raises(ValueError, match="p_scale"):
            call(reference.e4m3_model, batch, p_scale=p_scale)
    with pytest.raises(ValueError, match="counts"):
        call(reference.e4m3_model, batch, counts=torch.ones(1))
