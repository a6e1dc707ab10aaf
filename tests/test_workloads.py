# SPDX-License-Identifier: Apache-2.0
"""Lengths, the batch grammar and the paged caches made from them."""

import statistics
import time

import pytest
import torch

from kbmla import workloads
from kbmla.workloads import HUGE_PAGE, NAN_BYTE, Request

# ---------------------------------------------------------------- lengths


def test_uniform_and_mixed():
    assert workloads.uniform(3, 5) == [5, 5, 5]
    assert workloads.mixed((1, 9), (2, 4)) == [9, 4, 4]
    assert workloads.mixed() == []
    with pytest.raises(ValueError, match="group"):
        workloads.uniform(-1, 5)


def test_lognormal_is_the_seeded_rule():
    generator = torch.Generator().manual_seed(7)
    logs = torch.randn(64, generator=generator) * 1.3 + 8.0
    assert workloads.lognormal(64, 8.0) == logs.exp().clamp(16, 131072).int().tolist()
    assert set(workloads.lognormal(8, 50.0)) == {131072}
    with pytest.raises(ValueError, match="low"):
        workloads.lognormal(1, 8.0, low=5, high=4)


@pytest.mark.parametrize("trace", workloads.trace_names())
def test_draws_follow_the_percentiles(trace):
    entry = workloads._trace(trace)
    lengths = workloads.draw(trace, 20_000, 0)
    assert lengths == workloads.draw(trace, 20_000, 0) != workloads.draw(trace, 20_000, 1)
    ordered = sorted(lengths)
    knots = entry.get("knots", workloads._traces()["knots"])
    for knot, value in zip(knots, entry["percentiles"], strict=True):
        if 5 <= knot <= 95:
            below, above = (ordered[int(len(ordered) * (knot + d) / 100)] for d in (-1.5, 1.5))
            assert below <= value <= above
    assert min(lengths) >= int(0.3 * entry["percentiles"][0])
    p99 = entry["percentiles"][knots.index(99)]
    assert max(lengths) <= (1.1 * p99 if entry["cap"] else entry["percentiles"][-1])
    assert 0.7 < statistics.fmean(lengths) / entry["mean"] < 1.3
    assert workloads.trace_source(trace)


def test_draw_refuses():
    with pytest.raises(ValueError, match="azure-code"):
        workloads.draw("nosuch", 1, 0)
    with pytest.raises(ValueError, match="requests"):
        workloads.draw("azure-code", -1, 0)
    assert workloads.draw("azure-code", 0, 0) == []


# ---------------------------------------------------------------- grammar


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q2k", [(2048, 2048)]),
        ("q1s1k", [(1, 1024)]),
        ("2q4s1k", [(4, 1024)] * 2),
        ("1q1s128k_31q1s2k", [(1, 131072)] + [(1, 2048)] * 31),
        ("q1s1m", [(1, 1048576)]),
        ("q1s100", [(1, 100)]),
        ("q3", [(3, 3)]),
    ],
)
def test_parse(text, expected):
    assert workloads.parse(text) == [Request(*pair) for pair in expected]


@pytest.mark.parametrize(
    "text",
    ["", "_", "q", "s1k", "1q1s", "q1s1g", "q1K", "q1s1k_", "-1q1", "q1 s2", "0q1s5", "q0", "q4s2",
     "70000q1s1", "q1s9999999999", "q\u0661"],
)  # fmt: skip
def test_parse_names_the_segment(text):
    with pytest.raises(ValueError, match=r"batch .*segment"):
        workloads.parse(text)


# ---------------------------------------------------------------- paged caches


@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_every_byte_is_a_token_or_poison(page):
    lengths = [700, 0, 1, page, page + 1, -3]
    batch = workloads.paged_cache(lengths, page, seed=3, q=2, heads=5)
    assert batch.query.shape == (6, 2, 5, 576)
    assert batch.lengths.tolist() == lengths
    assert batch.lengths.dtype == batch.block_table.dtype == torch.int32
    assert batch.tokens == 702 + 2 * page
    assert batch.kv_bytes == batch.tokens * 576
    raw = batch.cache.view(torch.uint8)
    owned = torch.zeros(raw.shape[:2], dtype=torch.bool)
    for b, length in enumerate(lengths):
        pages = -(-max(length, 0) // page)
        assert (batch.block_table[b, pages:] == HUGE_PAGE).all()
        for n in range(max(length, 0)):
            owned[batch.block_table[b, n // page], n % page] = True
    assert int(owned.sum()) == batch.tokens, "no page has two owners"
    assert (raw[~owned] == NAN_BYTE).all()
    values = batch.cache.float()[owned]
    assert values.isfinite().all()
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02
    assert (~owned).any()


def test_pages_are_in_random_order():
    table = workloads.paged_cache([6400], 64).block_table[0, :100]
    assert sorted(table.tolist()) != table.tolist()


def test_without_poison_and_repeatable():
    make = lambda seed: workloads.paged_cache([65], 64, poison=False, seed=seed)  # noqa: E731
    first, again, other = make(0), make(0), make(1)
    assert not first.cache.float().isnan().any()
    assert int(first.block_table.max()) < first.cache.shape[0]
    assert torch.equal(first.cache.view(torch.uint8), again.cache.view(torch.uint8))
    assert not torch.equal(first.query.view(torch.uint8), other.query.view(torch.uint8))
    assert torch.equal(first.to("cpu").lengths, first.lengths)


def test_no_requests():
    batch = workloads.paged_cache([], 64)
    assert batch.query.shape[0] == batch.block_table.shape[0] == batch.tokens == 0


def test_large_batches_are_quick():
    begin = time.perf_counter()
    batch = workloads.paged_cache(workloads.uniform(100, 1000), 64)
    assert batch.tokens == 100_000
    assert time.perf_counter() - begin < 30, "seconds on a busy machine; one is usual"


@pytest.mark.parametrize("bad", [{"page_size": 0}, {"q": 0}, {"heads": 0}])
def test_paged_cache_refuses(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        workloads.paged_cache([1], **{"page_size": 64, **bad})
