# SPDX-License-Identifier: Apache-2.0
"""Tile layout, architecture names and the walks of both schedulers."""

import ctypes
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kbmla import helpers
from kbmla.helpers import (
    MLAStaticTileScheduler,
    MLAStaticTileSchedulerParams,
    MLAWorkListTileScheduler,
    WorkTileInfo,
)


def params(b=3, s=2, cluster=2, split=4, persistent=True):
    return MLAStaticTileSchedulerParams(persistent, b, s, (cluster, 1, 1), split)


def tiles(walk):
    return [info.tile_idx for info in walk]


# ---------------------------------------------------------------- layout, shapes, names


@given(st.integers(1, 128), st.integers(1, 64), st.sampled_from([64, 128]))
def test_q_tile_layout_covers_every_row(heads, q, m_tile):
    if heads > m_tile:
        with pytest.raises(ValueError, match="num_heads"):
            helpers.compute_q_tile_layout(heads, q, m_tile)
        return
    rows, count, tail = helpers.compute_q_tile_layout(heads, q, m_tile)
    assert rows == heads * q == (count - 1) * m_tile + tail
    assert 1 <= tail <= m_tile


@pytest.mark.parametrize("bad", [(0, 1, 128), (1, -1, 128), (1, 1, 0)])
def test_q_tile_layout_names_its_arguments(bad):
    with pytest.raises(ValueError, match="positive"):
        helpers.compute_q_tile_layout(*bad)


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 256))
def test_fold_is_the_largest_divisor_that_fits(heads, q, m_tile):
    fits = [f for f in range(1, q + 1) if q % f == 0 and f * heads <= m_tile]
    assert helpers.get_mla_decode_fold_sq_factor(heads, q, m_tile) == max(fits, default=1)


@pytest.mark.parametrize("args", [(0, 4), (4, 0), (4, 4, -1)])
def test_fold_of_nonsense_is_one(args):
    assert helpers.get_mla_decode_fold_sq_factor(*args) == 1


def test_arch_names():
    names = {(9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_103", (10, 7): "sm_107"}
    assert {c: helpers.get_mla_decode_arch(c) for c in names} == names
    for bad in [(8, 0), (9, 1), (12, 0)]:
        with pytest.raises(ValueError, match="compute_capability"):
            helpers.get_mla_decode_arch(bad)


@pytest.mark.parametrize(
    ("rows", "is_fp8", "capability", "m"),
    [
        (64, True, (10, 0), 64),
        (65, True, (10, 0), 128),
        (64, False, (10, 0), 128),
        (64, True, (9, 0), 128),
        (64, True, (10, 3), 128),
    ],
)
def test_tilers(rows, is_fp8, capability, m):
    got = helpers.select_mla_decode_tilers(rows, 1, is_fp8=is_fp8, compute_capability=capability)
    assert got == ((m, 128), (m, 256))


def test_tilers_refuse_other_devices():
    with pytest.raises(ValueError, match="compute_capability"):
        helpers.select_mla_decode_tilers(16, 1, is_fp8=True, compute_capability=(8, 0))


# ---------------------------------------------------------------- static scheduler


@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 2), st.integers(1, 5), st.integers(1, 40)
)
def test_persistent_walks_partition_the_tiles(b, s, cluster, split, clusters):
    p = params(b, s, cluster, split)
    grid = MLAStaticTileScheduler.get_grid_shape(p, clusters)
    assert grid == (min(clusters * cluster, b * s * cluster * split), 1, 1)
    linear = [
        (c, x, y, z)
        for z in range(split)
        for y in range(b)
        for x in range(s)
        for c in range(cluster)
    ]
    for i in range(grid[0]):
        walk = MLAStaticTileScheduler(p, i, (i, 0, 0), grid)
        assert walk.num_blocks == len(linear)
        assert tiles(walk) == linear[i :: grid[0]]


def test_grid_counts_the_whole_cluster():
    p = MLAStaticTileSchedulerParams(True, 100, 1, (2, 2, 1), 1)
    assert MLAStaticTileScheduler.get_grid_shape(p, 10) == (40, 1, 1)


def test_one_tile_per_block_when_not_persistent():
    p = params(persistent=False)
    grid = MLAStaticTileScheduler.get_grid_shape(p, 1)
    assert grid == (2, 6, 4)
    found = []
    for block in itertools.product(*map(range, grid)):
        (tile,) = tiles(MLAStaticTileScheduler(p, 0, block, grid))
        assert tile == (block[0], block[1] // 3, block[1] % 3, block[2])
        found.append(tile)
    assert len(set(found)) == 2 * 2 * 3 * 4
    assert tiles(MLAStaticTileScheduler(p, 0, (0, 0, 0), grid, is_valid=False)) == []


def test_static_verbs():
    p = params()
    walk = MLAStaticTileScheduler(p, 1, (1, 0, 0), (5, 1, 1))
    assert walk.initial_work_tile_info() == WorkTileInfo((1, 0, 0, 0), True)
    walk.advance_to_next_work(advance_count=2)
    assert walk.current_work_linear_idx == 11
    assert walk.get_current_work().tile_idx == (1, 1, 2, 0)
    walk.advance_to_next_work(advance_count=2**31 - 1)
    assert walk.current_work_linear_idx == 2**31 - 1, "a step saturates"
    assert not walk.get_current_work().is_valid_tile
    walk.advance_to_next_work()
    assert not walk.get_current_work().is_valid_tile


def test_no_requests_is_no_work():
    for persistent in (True, False):
        p = params(b=0, persistent=persistent)
        assert tiles(MLAStaticTileScheduler(p, 0, (0, 0, 0), (2, 1, 1))) == []
    assert (
        tiles(MLAWorkListTileScheduler(params(b=0), torch.tensor([0], dtype=torch.int32), 0, 1))
        == []
    )


# ---------------------------------------------------------------- work list


@given(st.data())
def test_work_list_walks_partition_the_prefix(data):
    b, s = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    cluster, clusters = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 9))
    every = [(x, y, z) for x in range(s) for y in range(b) for z in (0, 1, 255)]
    items = data.draw(st.lists(st.sampled_from(every), unique=True))
    work = [(x * b + y) << 8 | z for x, y, z in items] + [-1] * clusters
    work_list = torch.tensor(work, dtype=torch.int32)
    for cta in range(cluster * clusters):
        walk = MLAWorkListTileScheduler(params(b, s, cluster), work_list, cta, cluster * clusters)
        expected = [(cta % cluster, *item) for item in items[cta // cluster :: clusters]]
        assert tiles(walk) == expected


def test_work_list_verbs():
    work = torch.tensor([1 << 8 | 3, 5 << 8, -1, -1], dtype=torch.int32)
    walk = MLAWorkListTileScheduler(params(cluster=1), work, 0, 1)
    assert walk.initial_work_tile_info() == WorkTileInfo((0, 0, 1, 3), True)
    walk.advance_to_next_work()
    assert walk.get_current_work() == WorkTileInfo((0, 1, 2, 0), True)
    assert walk.current_work_linear_idx == 1
    walk.advance_to_next_work()
    assert walk.get_current_work() == WorkTileInfo((0, 0, 0, 0), False)


def test_a_list_without_an_end_ends_the_walk():
    foreign = torch.full((7,), 2**31 - 1, dtype=torch.int32)
    got = tiles(MLAWorkListTileScheduler(params(cluster=1), foreign, 0, 2))
    assert len(got) == 4
    assert all(request < 3 for _, _, request, _ in got)
    assert tiles(MLAWorkListTileScheduler(params(), foreign, 2**31 - 1, 2)) == []


@pytest.mark.parametrize("terminated", [True, False])
def test_the_walk_through_a_pointer_is_the_same(terminated):
    """What the kernels inline: the list is read, and its end respected, by C."""
    last = -1 if terminated else 5
    work = torch.tensor([3, 1 << 8 | 2, 4 << 8, 7, 1, last], dtype=torch.int32)
    p = params(b=3, cluster=2)
    lib = helpers.lib
    for cta in range(4):
        walk = helpers._WorkWalk(work.data_ptr(), len(work), 3, 2, 4, cta)
        tile, found = helpers._Tile(), []
        lib.kbmla_work_list_current(ctypes.byref(walk), ctypes.byref(tile))
        while tile.is_valid:
            found.append((tile.cta, tile.q_tile, tile.batch, tile.split))
            lib.kbmla_work_list_advance(walk, 1)
            lib.kbmla_work_list_current(ctypes.byref(walk), ctypes.byref(tile))
        assert found == tiles(MLAWorkListTileScheduler(p, work, cta, 4))
        assert len(found) == 3 - (terminated and cta // 2 == 1)


def test_a_walk_sees_the_list_change():
    work = torch.tensor([0, -1, -1], dtype=torch.int32)
    walk = MLAWorkListTileScheduler(params(cluster=1), work, 0, 1)
    walk.advance_to_next_work()
    assert not walk.get_current_work().is_valid_tile
    work[1] = 1 << 8
    assert walk.get_current_work().tile_idx == (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: params(b=-1), "problem_shape_b"),
        (lambda: params(s=0), "problem_shape_s"),
        (lambda: params(cluster=0), "cluster_shape_mnk"),
        (lambda: params(split=2**31), "split_kv"),
        (lambda: MLAStaticTileSchedulerParams(True, 1, 1, (1, 1), 1), "cluster_shape_mnk"),
        (lambda: MLAStaticTileSchedulerParams(True, 1, 1, (1, 1, 1), 1, loc=0), "loc"),
        (lambda: MLAStaticTileScheduler(params(), -1, (0, 0, 0), (1, 1, 1)), "linear_idx"),
        (lambda: MLAStaticTileScheduler(params(), 0, (0, 0), (1, 1, 1)), "blk_coord"),
        (lambda: MLAStaticTileScheduler.get_grid_shape(params(), 0), "max_active_clusters"),
        (lambda: MLAWorkListTileScheduler(params(), torch.zeros(4), 0, 1), "work_list"),
        (
            lambda: MLAWorkListTileScheduler(params(), torch.zeros(1, dtype=torch.int32), 0, 0),
            "num_ctas",
        ),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()


def test_a_walk_does_not_go_back():
    walk = MLAStaticTileScheduler(params(), 0, (0, 0, 0), (2, 1, 1))
    with pytest.raises(ValueError, match="advance_count"):
        walk.advance_to_next_work(advance_count=-1)
