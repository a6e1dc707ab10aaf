# SPDX-License-Identifier: Apache-2.0
"""Decode context parallel: each rank against float64 on its shard, and the merged ranks against
attention over the whole request."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import (
    Batch,
    core_for,
    decode,
    expected_marks,
    local_length,
    make_batch,
    mark_counts,
    mark_rows,
    probe_query,
    random_query,
    random_rows,
    shard,
)
from compare import LSE_BOUND, NORM_BOUND, assert_result, assert_same, merge, norm_error, truth
from hypothesis import given, settings
from hypothesis import strategies as st


def rank_batch(
    whole: list[torch.Tensor], query: torch.Tensor, cp: tuple[int, int, int], device, **kwargs
) -> Batch:
    """What one rank holds of a step."""
    rows = [shard(r, *cp) for r in whole]
    return make_batch(
        [r.shape[0] for r in rows],
        rows=rows,
        query=query,
        totals=[r.shape[0] for r in whole],
        cp=cp,
        device=device,
        **kwargs,
    )


def all_ranks(whole, query, world, interleave, device, plan=None, **kwargs):
    """(out, lse) of every rank, each checked against float64 on its shard."""
    parts = []
    for rank in range(world):
        batch = rank_batch(whole, query, (world, rank, interleave), device, **kwargs)
        got = decode(core_for(batch), batch, plan)
        assert_result(*got, *truth(batch))
        parts.append(got)
    return parts


def check_merged(whole, query, parts, device, **kwargs) -> None:
    """Merged ranks equal one device that holds everything: rows without keys included."""
    one = make_batch([r.shape[0] for r in whole], rows=whole, query=query, device=device, **kwargs)
    ref_out, ref_lse = truth(one)
    out, lse = merge(parts)
    # Each rank rounds to BF16 before the merge, 2^-9 of a value: inside the margin of the bound.
    assert norm_error(out, ref_out) <= NORM_BOUND
    empty = ref_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert (out[empty] == 0).all()
    if not empty.all():
        assert (lse - ref_lse)[~empty].abs().max() < LSE_BOUND


@pytest.mark.parametrize("interleave", [1, 16, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8])
def test_ranks_merge_to_the_whole(device, world, interleave):
    totals = [600, 2, 0, 65, 129]
    whole = random_rows(totals, seed=world)
    # Of another seed than any rows: of the same one, queries and keys are the same vectors, and
    # scores of 576 are not the Gaussian data that the bounds are for.
    query = random_query(len(totals), 3, 12, seed=100 + interleave)
    for plan in (None, 2):
        parts = all_ranks(whole, query, world, interleave, device, plan)
        check_merged(whole, query, parts, device)


@settings(max_examples=40)
@given(
    world=st.integers(1, 8),
    interleave=st.sampled_from([1, 2, 3, 16, 64, 1000]),
    q=st.integers(1, 8),
    heads=st.integers(1, 48),
    page=st.sampled_from([1, 16, 64]),
    totals=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    count=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_any_world(device, world, interleave, q, heads, page, totals, count, seed):
    whole = random_rows(totals, seed=seed)
    query = random_query(len(totals), q, heads, seed=seed + 1)
    parts = all_ranks(whole, query, world, interleave, device, count, page=page)
    check_merged(whole, query, parts, device)


@settings(max_examples=60)
@given(
    world=st.integers(1, 8),
    interleave=st.sampled_from([1, 2, 16, 64]),
    q=st.integers(1, 8),
    total=st.integers(0, 700),
)
def test_visible_tokens_of_every_rank(device, world, interleave, q, total):
    """Row t of a rank counts exactly the local tokens whose global position is below its bound."""
    for rank in {0, world // 2, world - 1}:
        cp = (world, rank, interleave)
        local = local_length(total, *cp)
        batch = make_batch(
            [local],
            2,
            q,
            rows=[mark_rows(local)],
            query=probe_query(1, q, 2),
            scales=(1.0, 1.0),
            totals=[total],
            cp=cp,
            device=device,
        )
        out, lse = decode(core_for(batch), batch, 2)
        for t in range(q):
            seen = local_length(total - (q - 1) + t, *cp)
            if seen == 0:
                assert lse[0, t].isneginf().all()
                assert (out[0, t] == 0).all()
            else:
                assert (lse[0, t].cpu() - math.log2(seen)).abs().max() < 1e-4
                assert (mark_counts(out[0, t], lse[0, t]) == expected_marks(seen)).all()


def test_world_of_one_is_the_plain_mask(device):
    """cp = (1, 0, I) with totals equal to lengths changes no bit, whatever I is."""
    batch = make_batch([300, 5, 0, 129], 16, 4, device=device, seed=1)
    core = core_for(batch)
    base = decode(core, batch, 3)
    for interleave in (1, 7, 64):
        same = replace(batch, cp=(1, 0, interleave), totals=batch.lengths.clone())
        assert_same(decode(core, same, 3), base)


def test_shorter_local_shard_bounds_what_is_seen(device):
    """A rank that holds fewer tokens than its share of the total sees what it holds, no more."""
    rows = [mark_rows(10)]
    batch = make_batch(
        [10],
        2,
        1,
        rows=rows,
        query=probe_query(1, 1, 2),
        scales=(1.0, 1.0),
        totals=[1000],
        cp=(2, 1, 1),
        device=device,
    )
    out, lse = decode(core_for(batch), batch)
    assert (lse.cpu() - math.log2(10)).abs().max() < 1e-4
    assert (mark_counts(out[0, 0], lse[0, 0]) == expected_marks(10)).all()


def test_huge_totals(device):
    """Totals, worlds and interleaves near 2^31 do not overflow the bound."""
    batch = make_batch(
        [64, 64, 64],
        2,
        2,
        rows=[mark_rows(64)] * 3,
        query=probe_query(3, 2, 2),
        scales=(1.0, 1.0),
        totals=[2**31 - 1, 0, -5],
        cp=(8, 7, 64),
        device=device,
    )
    core = core_for(batch)
    _, lse = decode(core, batch)
    assert (lse[0].cpu() - 6.0).abs().max() < 1e-4
    assert lse[1:].isneginf().all()
    wide = replace(batch, cp=(2**31 - 1, 0, 2**31 - 1))
    _, lse = decode(core, wide)
    assert (lse[0].cpu() - 6.0).abs().max() < 1e-4
    assert lse[1:].isneginf().all()


def test_merge_with_a_wrong_base_would_show():
    """The merge of these tests is in base 2: shards of 2 and 8 equal keys weigh 0.2 and 0.8."""
    ones = torch.ones(1, 1, 1, 512)
    lse = torch.full((1, 1, 1), 1.0)
    out, total = merge([(ones, lse), (ones * 0, torch.full((1, 1, 1), 3.0))])
    assert torch.allclose(out, ones.double() * 0.2, atol=1e-12)
    assert abs(total.item() - math.log2(10)) < 1e-12
