# SPDX-License-Identifier: Apache-2.0
"""Life cycle of BalancedMla: require, plan, decode; growing, sharing one workspace, wrong order."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import (
    Batch,
    auto_plan,
    core_for,
    decode,
    make_batch,
    new_out,
    new_workspace,
    valid_entries,
)
from compare import assert_bitwise, assert_result, assert_same, bits, truth

import kbmla
from kbmla import BalancedMla, core
from kbmla.core import CAPACITY, MIN_SPLIT_TOKENS, P_SCALE, TOKENSPEED_P_SCALE


def step(m: BalancedMla, batch: Batch, *, lse: bool = True, poison: int | None = 0x7F):
    """plan + decode of one batch on results full of NaN."""
    _, q, _ = batch.shape
    m.plan(q, batch.lengths)
    return layer(m, batch, lse=lse, poison=poison)


def layer(m: BalancedMla, batch: Batch, *, lse: bool = True, poison: int | None = 0x7F):
    out, lse_out = new_out(batch)
    if poison is not None:
        m.workspace.view(torch.uint8).fill_(poison)
    extra = {} if batch.totals is None else {"cp": batch.cp, "totals": batch.totals}
    result = m.decode(
        batch.query,
        batch.cache,
        batch.block_table,
        batch.lengths,
        batch.scales,
        out,
        lse_out if lse else None,
        **extra,
    )
    assert result is None
    return out, lse_out


def test_step(device):
    m = BalancedMla(16, device, False)
    for q, lengths in [(1, [9000, 5, 0]), (4, [300, 2000]), (2, [129] * 20)]:
        m.require(q, len(lengths))
        batch = make_batch(lengths, 16, q, device=device, seed=q)
        assert_result(*step(m, batch), *truth(batch))


def test_equals_the_core_it_holds(device):
    """The seed's class is a thin holder: the same core called directly gives the same bits."""
    batch = make_batch([5000, 100, 0], 12, 2, device=device, seed=1)
    m = BalancedMla(12, device, False)
    m.require(2, 3)
    got = step(m, batch)
    key = m.key(2, 3)
    direct = core.KvBalancedMla(
        12,
        2,
        3,
        True,
        device,
        key[1],
        MIN_SPLIT_TOKENS,
        partial_fp16=False,
        p_scale=P_SCALE,
        reducer_d_tiles=kbmla.reducer_d_tiles(12 * 2 * 3, device),
    )
    assert_same(got, decode(direct, batch))


def test_buffers(device):
    m = BalancedMla(12, device, False)
    assert m.cores == {}
    assert m.plans == {}
    assert m.workspace.numel() == 0
    m.require(1, 4)
    (key,) = m.cores
    assert key == m.key(1, 4) == (1, CAPACITY[False][0][1])
    counts, work = m.plans[key]
    assert counts.dtype == work.dtype == torch.int32
    assert m.workspace.dtype == torch.int8
    assert counts.device == work.device == m.workspace.device == device
    assert work.numel() == m.cores[key].list_len
    assert (work < 0).all(), "before the first plan the list is empty"
    assert m.workspace.numel() >= m.cores[key].workspace_bytes


def test_require_again_changes_nothing(device):
    """data_ptr of the plan must not move under a captured graph (vllm#33638)."""
    m = BalancedMla(12, device, False)
    m.require(2, 8)
    key = m.key(2, 8)
    kept = m.cores[key], *(t.data_ptr() for t in (*m.plans[key], m.workspace))
    for requests in (8, 1, 5, 0):
        m.require(2, requests)
        assert (m.cores[key], *(t.data_ptr() for t in (*m.plans[key], m.workspace))) == kept
    for _ in range(3):
        m.plan(2, torch.tensor([5000, 3], dtype=torch.int32, device=device))
        assert tuple(t.data_ptr() for t in m.plans[key]) == kept[1:3]


def test_growing(device):
    """More requests of the same class: a bigger core, results as before."""
    m = BalancedMla(16, device, False)
    m.require(1, 2)
    small = make_batch([3000, 10], 16, 1, device=device, seed=2)
    base = step(m, small)
    m.require(1, 9)
    assert m.cores[m.key(1, 9)].max_requests >= 9
    with pytest.raises(RuntimeError):
        layer(m, small)  # the plan of the core that was replaced is gone with it
    big = make_batch([100 * i for i in range(9)], 16, 1, device=device, seed=3)
    assert_result(*step(m, big), *truth(big))
    assert_result(*step(m, small), *truth(small))
    assert base[0].shape == (*small.query.shape[:3], 512)


def test_every_class_of_requests(device):
    """flashinfer#5170, #726: at, below and above the edge of every size class; beyond the last one
    ValueError, not StopIteration."""
    for dcp in (False, True):
        table = CAPACITY[dcp]
        m = BalancedMla(2, device, dcp)
        for most, capacity in table:
            for requests in (most - 1, most):
                assert m.key(1, requests)[1] == capacity
        for (most, _), (_, following) in itertools.pairwise(table):
            assert m.key(1, most + 1)[1] == following
        most = table[-1][0]
        for call in (m.key, m.require):
            with pytest.raises(ValueError, match="requests"):
                call(1, most + 1)


@pytest.mark.parametrize("dcp", [False, True])
def test_lists_hold_every_plan(device, dcp):
    """flashinfer#5170, #726: all of length 1 (most entries), all long (most splits) and alternating
    empty and long, at the edges of every class: entries = sum of counts * q tiles, within the list
    and followed by a wave of negatives."""
    for most, capacity in CAPACITY[dcp]:
        for requests in (most - 1, most):
            for clusters in (1, 132):
                c = core.KvBalancedMla(
                    96, 2, requests, True, device, capacity, MIN_SPLIT_TOKENS, clusters=clusters
                )
                for lengths in (
                    [1] * requests,
                    [10**6] * requests,
                    [0, 10**6] * (requests // 2) + [0] * (requests % 2),
                    [0] * requests,
                ):
                    big = torch.full((c.list_len + 64,), 0x5A5A5A5A, dtype=torch.int32)
                    big = big.to(device)
                    work = big[32:-32]
                    counts = torch.zeros(requests, dtype=torch.int32, device=device)
                    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
                    c.plan(on_device, counts, work)
                    entries = valid_entries(work)
                    assert (big[:32] == 0x5A5A5A5A).all()
                    assert (big[-32:] == 0x5A5A5A5A).all()
                    tiles = c.sizes.num_q_tiles
                    assert counts.min() >= 1
                    assert counts.max() <= 256
                    # An empty request needs no entry of a cluster; whether it has one is free.
                    total = int(counts.sum()) * tiles
                    empty = lengths.count(0) * tiles
                    assert len(entries) in range(total - empty, total + 1)
                    assert len(set(entries)) == len(entries)
                    assert len(entries) + clusters + c.max_requests <= c.list_len


def test_capacity_bounds_the_extra_entries(device):
    lengths = torch.full((4,), 10**6, dtype=torch.int32, device=device)
    for capacity in (0, 1, 5, 100):
        c = core.KvBalancedMla(96, 3, 4, True, device, capacity, 128, clusters=132)
        counts = torch.zeros(4, dtype=torch.int32, device=device)
        work = torch.zeros(c.list_len, dtype=torch.int32, device=device)
        c.plan(lengths, counts, work)
        tiles = c.sizes.num_q_tiles
        assert len(valid_entries(work)) - 4 * tiles <= capacity
        assert counts.max() == 1 if capacity == 0 else counts.max() >= 1


def test_cores_share_one_workspace(device):
    """sgl-kernel-xpu#487, flash-attention#190, flashinfer#3465, #3474: two cores take turns on one
    workspace, whatever the other left in it."""
    m = BalancedMla(16, device, False, clusters=64)
    batches = {q: make_batch([1, 128, 129, 9000], 16, q, device=device, seed=q) for q in (1, 4)}
    for q in batches:
        m.require(q, 4)
    base = {}
    for q, batch in batches.items():
        alone = BalancedMla(16, device, False, clusters=64)
        alone.require(q, 4)
        base[q] = step(alone, batch, poison=0)
    for round_ in range(4):
        for q, batch in batches.items():
            assert_same(step(m, batch, poison=None), base[q], f"round {round_}")


def test_one_plan_serves_all_layers(device):
    m = BalancedMla(16, device, False)
    m.require(2, 3)
    batches = [make_batch([4000, 64, 1], 16, 2, device=device, seed=s) for s in range(3)]
    m.plan(2, batches[0].lengths)
    plan = [t.clone() for t in m.plans[m.key(2, 3)]]
    for batch in batches:
        assert_result(*layer(m, batch), *truth(batch))
    for before, after in zip(plan, m.plans[m.key(2, 3)], strict=True):
        assert_bitwise(after, before, "the plan")


def test_order_of_calls(device):
    """State errors say what to call; nothing is written."""
    batch = make_batch([100, 5], 12, 1, device=device)
    m = BalancedMla(12, device, False)
    with pytest.raises(RuntimeError, match=r"require\(1, 2\)"):
        m.plan(1, batch.lengths)
    with pytest.raises(RuntimeError, match=r"require\(1, 2\)"):
        layer(m, batch, poison=None)
    m.require(1, 4)
    out, lse = new_out(batch)
    with pytest.raises(RuntimeError, match=r"plan first.*requests of 1 query tokens"):
        m.decode(batch.query, batch.cache, batch.block_table, batch.lengths, batch.scales, out, lse)
    assert out.isnan().all()
    assert lse.isnan().all()
    m.plan(1, torch.tensor([1, 2, 3], dtype=torch.int32, device=device))
    with pytest.raises(RuntimeError, match=r"plan.*3|3.*plan"):
        m.decode(batch.query, batch.cache, batch.block_table, batch.lengths, batch.scales, out, lse)
    assert out.isnan().all()
    assert lse.isnan().all()
    assert_result(*step(m, batch), *truth(batch))


def test_options_reach_the_cores(device):
    m = BalancedMla(12, device, True, policy="fixed", clusters=5, p_scale=16.0, partial_fp16=True)
    m.require(1, 2)
    (c,) = m.cores.values()
    assert c.clusters == 5
    assert c.config.p_scale == 16
    assert c.config.partial_fp16 == 1
    assert c.config.policy == core.POLICIES.index("fixed")


def test_supported(device):
    """No third outcome: supported, or False; never an exception."""
    for heads in (1, 6, 12, 96, 127, 128):
        for q in (1, 8):
            assert kbmla.supported(heads, q, device) is True
    for heads, q in [(0, 1), (129, 1), (12, 0), (-1, 1), (1, 1025), (128, 9), (2**40, 1)]:
        assert kbmla.supported(heads, q, device) is False
    assert kbmla.supported(12, 1, torch.device("meta")) is False
    assert kbmla.supported("12", None, device) is False  # type: ignore[arg-type]
    assert kbmla.supported(12, 1, "no such device") is False


def test_reducer_d_tiles(device):
    """Two bands where the rows fill at most half of the last wave."""
    if device.type == "cuda":
        wave = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        wave = torch.get_num_threads()
    for rows in (1, wave // 2, wave // 2 + 1, wave, wave + 1, 10 * wave):
        if rows < 1:
            continue
        want = 2 if math.ceil(2 * rows / wave) < 2 * math.ceil(rows / wave) else 1
        assert kbmla.reducer_d_tiles(rows, device) == want


def test_dcp_step(device):
    """totals and cp go through the class as given."""
    whole = [2000, 3, 0]
    rows = [torch.randn(n, 576).to(torch.float8_e4m3fn) for n in whole]
    cp = (2, 1, 16)
    held = [r[[i for i in range(r.shape[0]) if (i // 16) % 2 == 1]] for r in rows]
    batch = make_batch(
        [h.shape[0] for h in held], 16, 2, rows=held, totals=whole, cp=cp, device=device
    )
    m = BalancedMla(16, device, True)
    m.require(2, 3)
    assert_result(*step(m, batch), *truth(batch))


def test_two_models(device):
    """Two objects, head counts and policies in one process do not share state."""
    a, b = BalancedMla(16, device, False), BalancedMla(5, device, False, policy="equal")
    first = make_batch([3000, 40], 16, 1, device=device, seed=4)
    second = make_batch([50, 700], 5, 3, device=device, seed=5)
    a.require(1, 2)
    b.require(3, 2)
    alone = step(a, first)
    a.plan(1, first.lengths)
    b.plan(3, second.lengths)
    assert_result(*layer(a, first), *truth(first))
    assert_result(*layer(b, second), *truth(second))
    assert_same(layer(a, first), alone)


def test_stock_precision_on_request(device):
    """p_scale = 1 is the stock rule bit for bit: that of a core with TOKENSPEED_P_SCALE."""
    batch = make_batch([3000, 40], 16, 1, device=device, seed=4)
    m = BalancedMla(16, device, False, p_scale=TOKENSPEED_P_SCALE, clusters=64)
    m.require(1, 2)
    same = core_for(batch, capacity=m.key(1, 2)[1], min_split_tokens=MIN_SPLIT_TOKENS, p_scale=1.0)
    assert_same(step(m, batch), decode(same, batch))


def test_inputs_are_left_alone(device):
    batch = make_batch([700, 40], 16, 2, device=device, seed=6)
    m = BalancedMla(16, device, False)
    m.require(2, 2)
    names = ("query", "cache", "block_table", "lengths")
    before = {name: getattr(batch, name).clone() for name in names}
    step(m, batch)
    for name in names:
        assert_bitwise(getattr(batch, name), before[name], name)


@pytest.mark.gpu
def test_require_in_capture_is_refused(cuda):
    m = BalancedMla(16, cuda, False)
    m.require(1, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        m.require(1, 2)  # nothing to build
        with pytest.raises(RuntimeError, match="must be prepared before capture"):
            m.require(1, 3)
        with pytest.raises(RuntimeError, match="must be prepared before capture"):
            m.require(2, 1)
        torch.zeros(1, device=cuda)


@pytest.mark.gpu
def test_growing_keeps_what_a_graph_uses(cuda):
    """A graph captured before `require` grew the buffers replays as before."""
    m = BalancedMla(16, cuda, False)
    m.require(1, 2)
    batch = make_batch([3000, 70], 16, 1, device=cuda, seed=7)
    out, lse = new_out(batch)
    args = (batch.query, batch.cache, batch.block_table, batch.lengths, batch.scales, out, lse)
    base = tuple(t.clone() for t in step(m, batch))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        m.plan(1, batch.lengths)
        m.decode(*args)
    m.require(1, 16)
    m.require(8, 16)
    junk = [torch.full((2**20,), 0x7F, dtype=torch.uint8, device=cuda) for _ in range(64)]
    out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_same((out, lse), base)
    del junk


@pytest.mark.parametrize("heads", [4, 64])
def test_fixed_policy_is_batch_invariant(device, heads):
    """policy="fixed": whatever the neighbours, the size class, and what was prepared before."""
    long = make_batch([9000], heads, 1, device=device, seed=1)
    wanted = None
    for neighbours in (0, 15, 16, 64, 299):
        m = BalancedMla(heads, device, False, policy="fixed")
        lengths = torch.cat([long.lengths, torch.full((neighbours,), 64, device=device)]).int()
        requests = 1 + neighbours
        m.require(1, requests)
        m.plan(1, lengths)
        count = m.plans[m.key(1, requests)][0][0].item()
        table = torch.zeros(requests, long.block_table.shape[1], dtype=torch.int32, device=device)
        table[0], table[1:] = long.block_table[0], long.block_table[0, 0]
        query = long.query.expand(requests, 1, heads, 576)
        out = torch.empty(requests, 1, heads, 512, dtype=torch.bfloat16, device=device)
        m.decode(query, long.cache, table, lengths, long.scales, out)
        got = (count, bits(out[0]))
        if wanted is not None:
            assert got[0] == wanted[0]
            assert torch.equal(got[1], wanted[1])
        wanted = got
    assert wanted[0] > 1


def test_plans_in_buffers_of_ones_own(device):
    """A core plans into any buffers; each keeps the step it was planned for."""
    four, two = (make_batch([700, 64, 1, 300][:n], 16, 1, device=device, seed=n) for n in (4, 2))
    core = core_for(four)
    plan_four, plan_two = auto_plan(core, four.lengths), auto_plan(core, two.lengths)
    workspace = new_workspace(core, device)
    for batch, plan in ((four, plan_four), (two, plan_two), (four, plan_four)):
        out, lse = new_out(batch)
        tensors = (batch.query, batch.cache, batch.block_table, batch.lengths)
        core.decode(*tensors, *batch.scales, *plan, workspace, lse=lse, out=out)
        assert_result(out, lse, *truth(batch))
    tensors = (four.query, four.cache, four.block_table, four.lengths)
    with pytest.raises(RuntimeError, match="plan of 4 requests"):
        core.decode(*tensors, *four.scales, *plan_two, workspace, out=new_out(four)[0])
