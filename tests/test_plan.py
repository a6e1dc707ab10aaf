# SPDX-License-Identifier: Apache-2.0
"""The planner: format of its lists, coverage, limits, policies, and the modelled time of its plans.

Properties are checked by one function over the list itself, on batches drawn by hypothesis and on
thousands drawn from fixed seeds. The last tests hold the balancing rule to its aims on the model of
benchmarks/simulate_plan.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kbmla.core import CAPACITY, MIN_SPLIT_TOKENS, POLICIES, KvBalancedMla

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import simulate_plan

INT32_MAX = 2**31 - 1
GUARD = -7777  # in the elements of counts and work that a plan must not touch


def make_core(
    heads: int = 12,
    q: int = 1,
    requests: int = 8,
    clusters: int = 132,
    capacity: int = 528,
    min_split: int = 128,
    policy: str = "balanced",
) -> KvBalancedMla:
    return KvBalancedMla(
        heads, q, requests, True, "cpu", capacity, min_split, clusters=clusters, policy=policy
    )


def plan(
    core: KvBalancedMla, lengths: Sequence[int], work: torch.Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Counts of the requests and the list; checks that nothing beside them was written."""
    counts = torch.full((core.max_requests + 3,), GUARD, dtype=torch.int32)
    if work is None:
        work = torch.full((core.list_len + 5,), GUARD, dtype=torch.int32)
    core.plan(torch.tensor(list(lengths), dtype=torch.int32), counts, work)
    assert (counts[len(lengths) :] == GUARD).all()
    assert (work[core.list_len :] == GUARD).all()
    return counts[: len(lengths)].numpy(), work[: core.list_len].numpy()


def tiles_of(lengths: Sequence[int]) -> np.ndarray:
    return (np.maximum(np.array(lengths, dtype=np.int64), 0) + 127) // 128


def normalised(tiles: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The count without empty splits, where a request is cut into `counts` equal pieces."""
    per = np.maximum(-(-tiles // counts), 1)
    return np.maximum(-(-tiles // per), 1)


def check(core: KvBalancedMla, lengths: Sequence[int], counts: np.ndarray, work: np.ndarray) -> int:
    """Every promise of a plan's format and limits. Returns the number of entries."""
    sizes, q_tiles, batch = core.sizes, core.sizes.num_q_tiles, len(lengths)
    tiles = tiles_of(lengths)
    counts = counts.astype(np.int64)
    assert (counts >= 1).all()
    assert (counts <= 256).all()
    assert (counts == normalised(tiles, counts)).all()

    entries = int(counts.sum()) * q_tiles
    tail = core.list_len - core.max_requests
    assert entries - batch * q_tiles <= sizes.max_extra
    assert entries + core.clusters <= tail
    assert (work[:entries] >= 0).all()
    assert (work[entries:tail] == -1).all()

    # Each (q tile, request, split) exactly once, so that each KV tile is read once per q tile.
    expected = [
        (q_tile * batch + b) << 8 | split
        for q_tile in range(q_tiles)
        for b in range(batch)
        for split in range(counts[b])
    ]
    assert np.array_equal(np.sort(work[:entries]), np.sort(np.array(expected, dtype=np.int64)))

    # Slots of split requests: disjoint, without gaps, in the workspace. None for the others.
    is_split = counts > 1
    bases = ~work[tail : tail + batch].astype(np.int64)
    assert (work[tail : tail + batch][~is_split] == -1).all()
    assert (work[tail + batch :] == -1).all()
    used = np.concatenate(
        [
            np.arange(s, s + n * q_tiles)
            for s, n in zip(bases[is_split], counts[is_split], strict=True)
        ]
        or [np.zeros(0, dtype=np.int64)]
    )
    assert np.array_equal(np.sort(used), np.arange(len(used)))
    assert len(used) <= sizes.max_partials
    return entries


def loads(core: KvBalancedMla, lengths: Sequence[int], counts: np.ndarray, work: np.ndarray):
    """Tiles each cluster reads."""
    tiles, total = tiles_of(lengths), np.zeros(core.clusters, dtype=np.int64)
    for index, entry in enumerate(work):
        if entry < 0:
            break
        b, split = (entry >> 8) % len(lengths), entry & 255
        per = -(-tiles[b] // counts[b])
        total[index % core.clusters] += min(per, tiles[b] - split * per) if tiles[b] else 0
    return total


# ---------------------------------------------------------------- invariants

SHAPES = [(1, 1), (12, 1), (12, 5), (64, 1), (96, 1), (128, 1), (128, 2), (96, 5), (128, 8)]
LENGTHS = st.one_of(
    st.integers(0, 300),
    st.integers(0, 20_000),
    st.integers(0, 2_000_000),
    st.sampled_from([-(2**31), -1, 0, 1, 127, 128, 129, 2**26, INT32_MAX - 1, INT32_MAX]),
)


@settings(max_examples=1500)
@given(
    shape=st.sampled_from(SHAPES),
    policy=st.sampled_from(POLICIES),
    lengths=st.lists(LENGTHS, min_size=0, max_size=40),
    spare=st.integers(0, 5),
    clusters=st.sampled_from([1, 2, 3, 7, 66, 132, 4096]),
    capacity=st.sampled_from([0, 1, 2, 5, 40, 264, 1 << 20]),
    min_split=st.sampled_from([1, 128, 129, 256, 4096, INT32_MAX]),
)
def test_any_batch_is_planned_right(shape, policy, lengths, spare, clusters, capacity, min_split):
    core = make_core(
        *shape, max(1, len(lengths) + spare), clusters, capacity, min_split, policy
    )  # fmt: skip
    counts, work = plan(core, lengths)
    check(core, lengths, counts, work)
    if policy != "equal":
        most = tiles_of(lengths) // max(1, -(-min_split // 128))
        assert (counts <= np.maximum(most, 1)).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_seeded_batches(shape, policy):
    """Lengths over six orders of magnitude, batches up to the largest."""
    for seed in range(100):
        draws = np.random.default_rng(seed)
        batch = int(draws.choice([1, 2, 3, 17, 63, 64, 65, 128, 129, 300, 512, 513, 1024]))
        sigma = draws.choice([0.0, 0.5, 1.5, 3.0])
        lengths = np.exp(draws.normal(draws.uniform(3, 11), sigma, batch)).clip(0, INT32_MAX)
        lengths[draws.random(batch) < 0.1] = 0
        core = make_core(
            *shape, batch, int(draws.choice([2, 66, 132])), int(draws.choice([16, 264, 2048])),
            policy=policy,
        )  # fmt: skip
        values = lengths.astype(np.int64).tolist()
        counts, work = plan(core, values)
        try:
            check(core, values, counts, work)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {batch} requests") from error


@pytest.mark.parametrize("dcp", [False, True])
def test_edges_of_the_capacity_classes(dcp):
    """The most and fewest entries at every class's last request count, one less and one more."""
    sizes = [most for most, _ in CAPACITY[dcp]]
    for most in sizes:
        for batch in {max(1, most - 1), most, min(most + 1, sizes[-1])}:
            capacity = next(c for m, c in CAPACITY[dcp] if batch <= m)
            for heads, q in [(12, 1), (96, 1), (96, 5)]:
                core = make_core(heads, q, batch, 132, capacity, MIN_SPLIT_TOKENS)
                for lengths in ([1] * batch, [1 << 20] * batch, [0, 1 << 20] * (batch // 2)):
                    check(core, lengths, *plan(core, lengths))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_requests(policy):
    core = make_core(policy=policy)
    _, work = plan(core, [])
    assert (work == -1).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_lengths_below_zero_count_as_empty(policy):
    core = make_core(requests=5, policy=policy)
    below = plan(core, [-1, 70000, -(2**31), 5, -128])
    empty = plan(core, [0, 70000, 0, 5, 0])
    assert all(np.array_equal(a, b) for a, b in zip(below, empty, strict=True))
    assert below[0][[0, 2, 4]].tolist() == [1, 1, 1]


def test_sums_beyond_32_bits():
    core = make_core(requests=64, capacity=264)
    counts, work = plan(core, [2**26] * 64)
    check(core, [2**26] * 64, counts, work)
    assert len(set(counts.tolist())) == 1
    wide = make_core(128, 8, 1024, 66, 1 << 20)
    check(wide, [INT32_MAX] * 1024, *plan(wide, [INT32_MAX] * 1024))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_leaves_nothing_of_the_one_before(policy):
    core = make_core(96, 5, 32, 66, policy=policy)
    work = torch.full((core.list_len,), GUARD, dtype=torch.int32)
    plan(core, [1 << 20] * 32, work)
    small = plan(core, [100, 5000], work)
    check(core, [100, 5000], *small)
    assert np.array_equal(small[1], plan(core, [100, 5000])[1])


@pytest.mark.parametrize("policy", POLICIES)
def test_same_lengths_same_plan(policy):
    draws = np.random.default_rng(5)
    lengths = draws.integers(0, 200_000, 64).tolist()
    core = make_core(requests=64, policy=policy)
    first, second = plan(core, lengths), plan(core, lengths)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


# ---------------------------------------------------------------- policies


@settings(max_examples=300)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=16),
    others=st.lists(LENGTHS, min_size=0, max_size=15),
    data=st.data(),
)
def test_fixed_counts_depend_on_nothing_but_the_own_length(lengths, others, data):
    core = make_core(requests=31, policy="fixed")
    alone = [int(plan(core, [n])[0][0]) for n in lengths]
    order = data.draw(st.permutations(range(len(lengths))))
    mixed = [lengths[i] for i in order] + others
    counts = plan(core, mixed)[0]
    assert counts[: len(lengths)].tolist() == [alone[i] for i in order]


@settings(max_examples=300)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=40),
    shape=st.sampled_from(SHAPES),
)
def test_equal_counts_come_from_one_count(lengths, shape):
    core = make_core(*shape, len(lengths), policy="equal")
    counts = plan(core, lengths)[0]
    tiles = tiles_of(lengths)
    common = np.full_like(tiles, counts.max())
    longest = int(tiles.argmax())
    assert counts[longest] == counts.max()
    assert (counts == normalised(tiles, common)).all()


# ---------------------------------------------------------------- balance


def test_one_long_request_among_short_ones():
    lengths = [131072] + [1024] * 15
    core = make_core(16, 1, 16, 132, CAPACITY[False][0][1], MIN_SPLIT_TOKENS)
    counts, work = plan(core, lengths)
    load = loads(core, lengths, counts, work)
    assert load.max() <= 1.25 * load.mean()


def test_a_single_request_fills_one_wave_at_most():
    core = make_core(requests=1)
    assert plan(core, [64])[0].tolist() == [1]
    for length in (8192, 32768, 131072, 1 << 20):
        assert plan(core, [length])[0][0] <= core.clusters


@pytest.mark.parametrize("clusters", [1, 2, 4])
def test_small_waves(clusters):
    lengths = [131072] + [2048] * 31
    core = make_core(requests=32, clusters=clusters)
    counts, work = plan(core, lengths)
    check(core, lengths, counts, work)
    assert counts[0] >= counts[1:].max()
    load = loads(core, lengths, counts, work)
    assert load.max() <= 1.15 * load.mean()


@pytest.mark.parametrize("clusters", [2, 66, 132])
@pytest.mark.parametrize("rounds", [1, 3])
def test_an_even_wave_is_not_split(clusters, rounds):
    core = make_core(requests=clusters * rounds, clusters=clusters)
    assert (plan(core, [4096] * (clusters * rounds))[0] == 1).all()


def test_clusters_take_long_entries_before_short_ones():
    lengths = np.random.default_rng(3).integers(1, 30_000, 300).tolist()
    core = make_core(requests=300)
    counts, work = plan(core, lengths)
    tiles = tiles_of(lengths)
    per = -(-tiles // counts)
    first = [int(per[(e >> 8) % 300]) for e in work[:132]]
    second = [int(per[(e >> 8) % 300]) for e in work[132:264]]
    assert np.mean(first) > np.mean(second)


def test_q_tiles_of_one_split_are_neighbours():
    lengths = [50_000, 3_000, 700, 20_000]
    core = make_core(96, 5, 4, 66)
    counts, work = plan(core, lengths)
    entries = check(core, lengths, counts, work)
    where = {int(e): i for i, e in enumerate(work[:entries])}
    apart = []
    for b in range(4):
        for split in range(counts[b]):
            at = [where[(t * 4 + b) << 8 | split] for t in range(4)]
            apart.append(max(at) - min(at) != 3)
    # A group of four may lie across the end of a row of the wave.
    assert sum(apart) <= entries // core.clusters


# ---------------------------------------------------------------- modelled time


@pytest.fixture(scope="module")
def results() -> list[simulate_plan.Result]:
    return [simulate_plan.simulate(s) for s in simulate_plan.main_scenarios()]


def test_time_is_near_the_bound(results):
    ratios = [r.times["balanced"] / r.bound for r in results]
    assert min(ratios) >= 0.999, "the bound is not one"
    assert simulate_plan.geomean(ratios) <= 1.15


def test_mixed_batches_gain_at_least_twofold_over_equal_splits(results):
    mixed = [r.times["equal"] / r.times["balanced"] for r in results if r.scenario.is_mixed]
    assert len(mixed) > 50
    assert simulate_plan.geomean(mixed) >= 2


def test_no_batch_is_far_behind_contiguous_cuts(results):
    ratios = {(r.scenario.name, r.scenario.rows): r.against_contiguous for r in results}
    assert simulate_plan.geomean(list(ratios.values())) <= 1
    behind = {key: at for key, at in ratios.items() if at > 1.05}
    assert behind == {}


def test_random_batches_keep_the_aims():
    """On a seed that no constant of the rule was chosen on, and on enough of its batches: the mean
    of 60 has a standard error of 0.6 %, of 240 half of that."""
    fresh = [simulate_plan.simulate(s) for s in simulate_plan.random_scenarios(240, 31337)]
    assert simulate_plan.geomean([r.times["balanced"] / r.bound for r in fresh]) <= 1.15
    assert simulate_plan.geomean([r.against_contiguous for r in fresh]) <= 1
    assert min(t / r.bound for r in fresh for t in r.times.values()) >= 0.999
