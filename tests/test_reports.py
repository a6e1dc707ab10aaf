# SPDX-License-Identifier: Apache-2.0
"""Public bug reports on split-KV and MLA decode, as tests. The number in a name is the report's in
this suite's list; the docstring names the thread. `ELSEWHERE` says which test of another file holds
a report, and `test_every_report_has_a_test` that none is missing."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import replace

import pytest
import torch
from cases import (
    FP8,
    NAN_BYTE,
    TILE,
    Batch,
    auto_plan,
    core_for,
    decode,
    expected_marks,
    guarded,
    in_child,
    local_length,
    make_batch,
    make_core,
    mark_counts,
    mark_rows,
    new_out,
    new_plan,
    new_workspace,
    normal_count,
    planned_counts,
    probe_batch,
    probe_query,
    probe_rows,
    random_query,
    random_rows,
    shard,
    valid_entries,
)
from compare import (
    NORM_BOUND,
    assert_bitwise,
    assert_probe,
    assert_result,
    assert_same,
    merge,
    truth,
)
from conftest import need_cuda

import kbmla
from kbmla import BalancedMla

REPORTS = [
    1, 2, 4, 5, 6, 7, 8, 10, 11, 12, 13, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 27, 29, 30, 32, 33,
    34, 36, 37, 38, 39, 40, 42, 43, 44, 45, 46, 47, 49, 50, 51, 53, 54,
]  # fmt: skip

ELSEWHERE = {
    10: ("test_decode", "test_strides_are_honoured"),
    12: ("test_numerics", "test_logits_of_two_thousand"),
    15: ("test_balanced", "test_lists_hold_every_plan"),
    27: ("test_ops", "test_current_stream"),
    38: ("test_numerics", "test_maxima_that_rise_tile_by_tile"),
    39: ("test_numerics", "test_stock_precision_loses_weak_keys"),
    40: ("test_numerics", "test_scales"),
    43: ("test_build", "test_43_build_without_a_gpu"),
    44: ("test_build", "test_44_architectures"),
    45: ("test_build", "test_45_parallel_jobs"),
    46: ("test_abi", "test_import_without_torch_first"),
    47: ("test_build", "test_47_isolated_build"),
    49: ("test_ops", "test_compiled_step"),
}


def test_every_report_has_a_test():
    here = {int(m[1]) for name in globals() if (m := re.match(r"test_(\d\d)_", name))}
    assert here.isdisjoint(ELSEWHERE)
    assert sorted(here | ELSEWHERE.keys()) == REPORTS
    for module, name in ELSEWHERE.values():
        assert callable(getattr(importlib.import_module(module), name)), name


def assert_marks(out: torch.Tensor, lse: torch.Tensor, b: int, seen: list[int]) -> None:
    """Row t of request b counted exactly its first seen[t] tokens."""
    for t, n in enumerate(seen):
        if n <= 0:
            assert (out[b, t] == 0).all(), (b, t)
            assert lse[b, t].isneginf().all(), (b, t)
            continue
        assert (lse[b, t].cpu() - math.log2(n)).abs().max() < 1e-4, (b, t)
        assert (mark_counts(out[b, t], lse[b, t]) == expected_marks(n)).all(), (b, t)


def i32(values: list[int], device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# ---------------------------------------------------------------------------- A. empty requests


def test_01_requests_of_length_zero(device):
    """FlashMLA#11, sglang#5875, vllm#35969. That the table is not read before its start is
    test_decode's fenced run; here the values."""
    lengths = [0, 1, 0, 130, -1]
    batch = make_batch(lengths, 16, 1, device=device, seed=1)
    table = batch.block_table.clone()
    for b in (0, 2, 4):
        table[b] = -1
    with guarded(table) as guarded_table:
        batch = replace(batch, block_table=guarded_table)
        core = core_for(batch)
        counts = [1, 1, 1, 2, 1]
        out, lse = decode(core, batch, counts)
    for b, n in enumerate(lengths):
        if n > 0:
            solo = batch.solo(b)
            assert_same(decode(core_for(solo), solo, counts[b]), (out[b : b + 1], lse[b : b + 1]))
        else:
            assert (out[b] == 0).all()
            assert lse[b].isneginf().all()


@pytest.mark.parametrize("columns", [None, 2048])
def test_02_padded_slots(device, columns):
    """vllm#37442, flashinfer#2883, vllm#57094: NaN in a padded slot reaches a later amax."""
    batch = make_batch([77] + [0] * 7, 16, 1, device=device, seed=2, columns=columns)
    out, lse = decode(core_for(batch), batch)
    assert not out.isnan().any()
    assert (out[1:] == 0).all()
    assert lse[1:].isneginf().all()
    solo = batch.solo(0)
    assert_same(decode(core_for(solo), solo), (out[:1], lse[:1]))


def test_04_less_work_than_workers(device):
    """DeepGEMM#344: idle workers read the length after the last. Its value changes nothing; that it
    is not read at all is test_decode's fenced run."""
    batch = make_batch([50], 16, 1, device=device, seed=3, columns=1)
    core = core_for(batch)
    base = decode(core, batch)
    for beyond in (2**30, -1, 2**31 - 1):
        buffer = i32([50, beyond], device)
        cut = replace(batch, lengths=buffer[:1])
        assert_same(decode(core, cut), base)
        assert planned_counts(core, buffer[:1]) == [1]


@pytest.mark.parametrize("q", [1, 4])
def test_05_no_requests(device, q):
    """tokenspeed#1077, sglang#15227, flashinfer#3888: an idle rank steps with B = 0, and the next
    real step is right."""
    m = BalancedMla(16, device, False)
    m.require(q, 3)
    batch = make_batch([300, 5, 0], 16, q, device=device, seed=4)
    empty = make_batch([], 16, q, device=device, columns=1)
    reference = truth(batch)
    for b in (batch, empty, batch):
        out, lse = new_out(b)
        m.require(q, b.lengths.numel())
        m.plan(q, b.lengths)
        m.decode(b.query, b.cache, b.block_table, b.lengths, b.scales, out, lse)
        if b is batch:
            assert_result(out, lse, *reference)
        else:
            assert out.shape == (0, q, 16, 512)
            assert not valid_entries(m.plans[m.key(q, 0)][1])


# ---------------------------------------------------------------------------- B. pages, layout


@pytest.mark.parametrize("count", [1, 2])
def test_06_nan_in_unused_slots(device, count):
    """flashinfer#941, #942, flash-attention#2374, vllm#43961: masked P = 0 times NaN."""
    lengths = [13, 65, 127]
    clean = make_batch(lengths, 16, 2, device=device, seed=5, poison=0)
    core = core_for(clean)
    base = decode(core, clean, count)
    for poison in (NAN_BYTE, 0xFF, 0x7E):
        dirty = make_batch(lengths, 16, 2, device=device, seed=5, poison=poison)
        assert_same(decode(core, dirty, count), base, f"poison {poison:#x}")
    # NaN in a visible key is the caller's, and stays with the request that has it.
    cache = clean.cache.clone()
    cache.view(torch.uint8)[clean.block_table[1, 0].long(), 7, 100] = NAN_BYTE
    out, lse = decode(core, replace(clean, cache=cache), count)
    assert out[1].isnan().any()
    for b in (0, 2):
        assert_same((out[b], lse[b]), (base[0][b], base[1][b]))


@pytest.mark.parametrize(("page", "lengths"), [(64, [257]), (16, [1, 16, 17, 129])])
def test_07_table_read_past_its_row(device, page, lengths):
    """vllm#56862, flashinfer#4365."""
    need = -(-max(lengths) // page)
    exact = make_batch(lengths, 16, 1, page=page, device=device, seed=6, columns=need)
    core = core_for(exact)
    with guarded(exact.block_table) as table:
        base = decode(core, replace(exact, block_table=table), 2)
    for unused in (2**30, -1):
        wide = make_batch(
            lengths, 16, 1, page=page, device=device, seed=6, columns=need + 3, unused=unused
        )
        assert_same(decode(core, wide, 2), base, f"unused {unused}")


@pytest.mark.slow
def test_08_large_page_ids(device):
    """flashinfer#3130, #3136, tokenspeed#501, aiter#2768: page * stride passes 2^31 and 2^32. The
    cache is 4.4 GB of address space, of which only eight pages are touched."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    rows = random_rows([256], seed=7)
    pages = rows[0].view(4, 64, 576).view(torch.uint8).to(device)
    cache = torch.empty(120_000, 64, 576, dtype=torch.uint8, device=device)
    ids = [[0, 1, 2, 3], [58254, 58255, 116508, 116509], [119_999, 0, 58254, 3]]
    results = []
    for table in ids:
        cache[table] = pages
        batch = Batch(
            random_query(1, 1, 16).to(device),
            cache.view(FP8),
            i32([table], device).view(1, 4),
            i32([256], device),
            rows,
        )
        results.append(decode(core_for(batch), batch, 2))
    for got in results[1:]:
        assert_same(got, results[0])
    small = replace(
        batch, cache=cache[:4].clone().view(FP8), block_table=i32([[0, 1, 2, 3]], device)
    )
    small.cache.view(torch.uint8).copy_(pages)
    assert_result(*results[0], *truth(small))


@pytest.mark.parametrize("policy", ["balanced", "equal", "fixed"])
def test_08_sums_of_lengths_beyond_32_bits(device, policy):
    """The planner's half of flashinfer#3130: 64 lengths of 2^26 sum to 2^32, and 2^31 - 1 each."""
    for length in (2**26, 2**31 - 1):
        core = make_core(16, 1, 64, device, clusters=132, capacity=264, policy=policy)
        counts = planned_counts(core, i32([length] * 64, device))
        assert len(set(counts)) == 1
        assert counts[0] >= 1


@pytest.mark.parametrize("page", [1, 8, 16, 32, 64, 128, 256])
def test_11_page_size_is_used(device, page):
    """aiter#2996, FlashMLA#84: an accepted page size that is ignored."""
    lengths = [1, page - 1, page, page + 1, 3 * page + 5]
    batch = probe_batch([mark_rows(n) for n in lengths], 8, 1, page=page, device=device)
    core = core_for(batch)
    for count in (1, 3):
        out, lse = decode(core, batch, count)
        for b, n in enumerate(lengths):
            assert_marks(out, lse, b, [n])


@pytest.mark.parametrize("page", [3, 48, 65, 512])
def test_11_other_page_sizes_are_refused(device, page):
    batch = make_batch([100], 8, 1, page=page, device=device)
    with pytest.raises(ValueError, match=f"power of two.*{page}"):
        decode(core_for(batch), batch)


# ---------------------------------------------------------------------------- C. splits


def sweep_13(kind: str, requests: list[int], lengths: list[int], repeats: int) -> None:
    """All (B, L), q in turn, on shared pages: one cache serves every request of a batch."""
    device = torch.device(kind)
    longest = max(lengths)
    rows = random_rows([longest], seed=8)
    for i, b in enumerate(requests):
        for length in lengths:
            q = (1, 2, 4)[(i + length) % 3]
            one = make_batch(
                [length],
                2,
                q,
                rows=[rows[0][:length]],
                device=device,
                seed=8,
                columns=-(-longest // 64),
            )
            batch = replace(
                one,
                query=one.query.expand(b, -1, -1, -1),
                block_table=one.block_table.repeat(b, 1),
                lengths=one.lengths.repeat(b),
                rows=one.rows * b,
            )
            reference_out, reference_lse = truth(one)
            core = make_core(2, q, b, device, clusters=132, capacity=264, min_split_tokens=256)
            for repeat in range(repeats):
                out, lse = decode(core, batch)
                if repeat in (0, repeats - 1):
                    assert_result(
                        out, lse, reference_out.expand_as(out), reference_lse.expand_as(lse)
                    )


@pytest.mark.parametrize("requests", [[1, 2, 3, 5, 8], [31, 33], [64, 127, 128]])
def test_13_no_pair_hangs(device, requests):
    """vllm#24966, #25509, sglang#6929: (batch, split) pairs that hang. On the CPU each pair runs
    twice and the longest requests run where the batch is small; CUDA runs every pair 50 times."""
    lengths = [1, 127, 128, 129, 1024, 4097]
    if device.type == "cuda" or requests[-1] <= 8:
        lengths.append(65536)
    repeats = 50 if device.type == "cuda" else 2
    seconds = 300 if device.type == "cuda" else 60
    in_child("test_reports", "sweep_13", str(device), requests, lengths, repeats, seconds=seconds)


def run_17(kind: str) -> None:
    batch = make_batch([64, 40_000, 700], 12, 16, device=kind, seed=9)
    core = core_for(batch)
    assert core.sizes.num_q_tiles == 2
    plan = auto_plan(core, batch.lengths)
    entries = [(e >> 8) // 3 for e in valid_entries(plan[1]) if (e >> 8) % 3 == 1 and e & 255 > 0]
    assert max(entries) == 1, "tile, batch and split above 0 occur together"
    assert_result(*decode(core, batch, plan), *truth(batch))


def test_17_packed_entries(device):
    """flash-attention#2760, #2761: a work word unpacked by some and used raw by others."""
    in_child("test_reports", "run_17", str(device), seconds=20 if device.type == "cuda" else 60)


def test_18_without_lse(device):
    """flashinfer#50: wrong output only when the caller does not ask for the LSE."""
    batch = make_batch([9000, 50], 16, 1, device=device, seed=10)
    core = core_for(batch)
    for plan in (None, [20, 1]):
        for order in ((True, False), (False, True)):
            workspace = new_workspace(core, device)
            got = {x: decode(core, batch, plan, with_lse=x, workspace=workspace) for x in order}
            assert_bitwise(got[True][0], got[False][0], "out")
            assert got[False][1].isnan().all()
            assert not got[True][1].isnan().any()


@pytest.mark.parametrize("fill", [0x7F, 0xFF, "inf", "-inf"])
def test_19_stale_workspace(device, fill):
    """sgl-kernel-xpu#487, flash-attention#190, flashinfer#3465, #3474: dead splits and stale bytes
    in shared scratch. Two cores take turns after a step with larger counts everywhere."""
    lengths = [1, 128, 129, 20_000]
    cores = {q: make_core(16, q, 4, device) for q in (1, 4)}
    batches = {q: make_batch(lengths, 16, q, device=device, seed=11) for q in cores}
    size = max(c.workspace_bytes for c in cores.values())
    base = {
        q: decode(
            cores[q],
            batches[q],
            [1, 1, 2, 9],
            workspace=torch.zeros(cores[q].workspace_bytes, dtype=torch.int8, device=device),
        )
        for q in cores
    }
    shared = torch.empty(size, dtype=torch.int8, device=device)
    if isinstance(fill, str):
        shared.view(torch.float32).fill_(float(fill))
    else:
        shared.view(torch.uint8).fill_(fill)
    larger = make_batch([4000] * 4, 16, 4, device=device, seed=12)
    decode(cores[4], larger, 20, workspace=shared)
    for _ in range(3):
        for q, core in cores.items():
            assert_same(decode(core, batches[q], [1, 1, 2, 9], workspace=shared), base[q])


@pytest.mark.parametrize("length", [257, 260, 264, 388])
def test_20_split_beyond_the_causal_bound(device, length):
    """aiter#4711: a split that the early rows do not see: weight 0 times a NaN partial."""
    rows = [mark_rows(length)]
    batch = probe_batch(rows, 16, 8, device=device)
    core = core_for(batch)
    for count in (2, 3, 4):
        out, lse = decode(core, batch, count)
        assert_marks(out, lse, 0, [length - 7 + t for t in range(8)])
    random = make_batch([length], 16, 8, device=device, seed=13)
    assert_result(*decode(core, random, 3), *truth(random))


def test_21_results_by_request(device):
    """flash-attention#176: with q > 1 and splits every result lands on request 0."""
    lengths = [5000, 300, 20_000]
    rows = [probe_rows(0.0, torch.full((512,), float(b + 1)), n) for b, n in enumerate(lengths)]
    batch = probe_batch(rows, 16, 4, device=device)
    for plan in (None, [5, 2, 40]):
        out, lse = decode(core_for(batch), batch, plan)
        for b, n in enumerate(lengths):
            assert (out[b] == b + 1).all()
            for t in range(4):
                assert (lse[b, t].cpu() - math.log2(n - 3 + t)).abs().max() < 1e-4


# ---------------------------------------------------------------------------- D. plans, graphs


def growing_steps(device, steps: int, first: int = 60) -> list[Batch]:
    rows = random_rows([first + steps] * 8, seed=14)
    batch = make_batch([first + steps] * 8, 16, 1, rows=rows, device=device, seed=14)
    return [
        replace(batch, lengths=i32([n] * 8, device), rows=[r[:n] for r in rows])
        for n in range(first, first + steps)
    ]


def test_22_lengths_that_grow(device):
    """vllm#33638, #35175, #36611 without the graph: the same plan buffers, every step right across
    page, tile and split edges."""
    m = BalancedMla(16, device, False, clusters=64)
    m.require(1, 8)
    pointers = [t.data_ptr() for t in m.plans[m.key(1, 8)]]
    lengths = torch.zeros(8, dtype=torch.int32, device=device)
    for batch in growing_steps(device, 200)[::3]:
        lengths.copy_(batch.lengths)
        out, lse = new_out(batch)
        m.plan(1, lengths)
        m.decode(batch.query, batch.cache, batch.block_table, lengths, batch.scales, out, lse)
        solo = batch.solo(5)
        reference = truth(solo)
        assert_result(out[5:6], lse[5:6], *reference)
        assert [t.data_ptr() for t in m.plans[m.key(1, 8)]] == pointers


@pytest.mark.gpu
def test_22_graph_of_growing_lengths(cuda):
    """vllm#33638, #36611: 200 replays of one capture, each equal to eager."""
    m = BalancedMla(16, cuda, False)
    m.require(1, 8)
    steps = growing_steps(cuda, 200)
    batch, lengths = steps[0], steps[0].lengths.clone()
    out, lse = new_out(batch)

    def step() -> None:
        m.plan(1, lengths)
        m.decode(batch.query, batch.cache, batch.block_table, lengths, batch.scales, out, lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for each in steps:
        lengths.copy_(each.lengths)
        step()
        torch.cuda.synchronize()
        eager = out.clone(), lse.clone()
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same((out, lse), eager)


def run_23(kind: str) -> None:
    device = torch.device(kind)
    batch = make_batch([9000, 9000], 16, 2, device=device, seed=15)
    for policy in ("balanced", "equal", "fixed"):
        core = core_for(batch, policy=policy, min_split_tokens=256)
        plan = auto_plan(core, i32([256, 4096], device))
        for lengths in ([257, 8192], [1, 0], [256, 4098], [9000, 1], [-1, 9000]):
            now = replace(
                batch,
                lengths=i32(lengths, device),
                rows=[r[: max(n, 0)] for r, n in zip(batch.rows, lengths, strict=True)],
            )
            with guarded(new_workspace(core, device)) as workspace:
                decode(core, now, plan, workspace=workspace)
            assert_result(*decode(core, now), *truth(now))


def test_23_old_plan_new_lengths(device):
    """flashinfer#4365, TensorRT-LLM#19037: undefined but safe, and right after a new plan."""
    in_child("test_reports", "run_23", str(device), seconds=40)


LIVE = [8, 3, 8, 1, 0, 5]


def shrunk(batch: Batch, live: int) -> Batch:
    lengths, table = batch.lengths.clone(), batch.block_table.clone()
    lengths[live:] = 0
    table[live:] = -1
    return replace(batch, lengths=lengths, block_table=table)


def test_24_fewer_live_requests(device):
    """vllm-project/FlashMLA#3, vllm#21691, xllm#1939 without the graph: no stale entry, the tail is
    empty, live rows as in a batch of that size."""
    batch = make_batch([900, 64, 1, 4000, 128, 300, 77, 2000], 16, 1, device=device, seed=16)
    core = core_for(batch, policy="fixed")
    counts, work = new_plan(core, device)
    for live in LIVE:
        now = shrunk(batch, live)
        core.plan(now.lengths, counts, work)
        entries = valid_entries(work)
        stale = [e for e in entries if (e >> 8) % 8 >= live and e & 255 > 0]
        assert not stale
        out, lse = decode(core, now, (counts, work))
        assert (out[live:] == 0).all()
        assert lse[live:].isneginf().all()
        if live:
            small = replace(
                now,
                query=batch.query[:live],
                block_table=batch.block_table[:live],
                lengths=batch.lengths[:live],
                rows=batch.rows[:live],
            )
            assert_same(decode(core, small), (out[:live], lse[:live]))


@pytest.mark.gpu
def test_24_graph_with_fewer_live_requests(cuda):
    """vllm-project/FlashMLA#3, vllm#21691, xllm#1939."""
    batch = make_batch([900, 64, 1, 4000, 128, 300, 77, 2000], 16, 1, device=cuda, seed=16)
    m = BalancedMla(16, cuda, False, policy="fixed")
    m.require(1, 8)
    lengths, table = batch.lengths.clone(), batch.block_table.clone()
    out, lse = new_out(batch)

    def step() -> None:
        m.plan(1, lengths)
        m.decode(batch.query, batch.cache, table, lengths, batch.scales, out, lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for live in LIVE:
        now = shrunk(batch, live)
        lengths.copy_(now.lengths)
        table.copy_(now.block_table)
        step()
        torch.cuda.synchronize()
        eager = out.clone(), lse.clone()
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same((out, lse), eager)
        assert (out[live:] == 0).all()
        assert lse[live:].isneginf().all()


def test_25_plan_follows_lengths_not_capture(device):
    """vllm#51119 without the graph: the count comes from the lengths of each plan call."""
    core = make_core(16, 1, 1, device, clusters=132, capacity=264, min_split_tokens=256)
    counts, work = new_plan(core, device)
    lengths = i32([1], device)
    core.plan(lengths, counts, work)
    assert counts[0] == 1
    lengths.fill_(131072)
    core.plan(lengths, counts, work)
    fresh = auto_plan(core, lengths)
    assert_bitwise(counts, fresh[0], "counts")
    assert_bitwise(work, fresh[1], "work")
    assert counts[0] > 60


@pytest.mark.gpu
def test_25_graph_captured_at_length_one(cuda):
    """vllm#51119."""
    batch = make_batch([131072], 16, 1, device=cuda, seed=17)
    m = BalancedMla(16, cuda, False)
    m.require(1, 1)
    lengths = i32([1], cuda)
    out, lse = new_out(batch)

    def step() -> None:
        m.plan(1, lengths)
        m.decode(batch.query, batch.cache, batch.block_table, lengths, batch.scales, out, lse)

    def time(run) -> float:
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    lengths.fill_(131072)
    graph.replay()
    torch.cuda.synchronize()
    assert_result(out, lse, *truth(batch))
    counts = m.plans[m.key(1, 1)][0].clone()
    step()
    assert torch.equal(counts, m.plans[m.key(1, 1)][0])
    assert time(graph.replay) <= 1.1 * time(step)


# ---------------------------------------------------------------------------- E. several query rows


def test_29_table_is_by_request(device):
    """vllm#51848: the table indexed by query token. That nothing past it is read is test_decode's
    fenced run."""
    lengths = [200, 3, 129, 70]
    batch = probe_batch([mark_rows(n) for n in lengths], 8, 3, device=device, columns=4)
    with guarded(batch.block_table) as table, guarded(batch.lengths) as lens:
        now = replace(batch, block_table=table, lengths=lens)
        for count in (1, 2):
            out, lse = decode(core_for(now), now, count)
            for b, n in enumerate(lengths):
                assert_marks(out, lse, b, [n - 2 + t for t in range(3)])


@pytest.mark.parametrize(("q", "length"), [(2, 3), (5, 2), (2, 129), (5, 129), (2, 128), (5, 128)])
def test_30_causal_bound(device, q, length):
    """flashinfer#348, #4452: off by one, and rows before the first token with a finite LSE."""
    g = torch.Generator().manual_seed(18)
    v = torch.randint(-3, 4, (length, 512), generator=g) / 2.0
    batch = probe_batch([probe_rows(0.0, v, length)], 4, q, device=device)
    for count in (1, 2):
        out, lse = decode(core_for(batch), batch, count)
        for t in range(q):
            seen = length - (q - 1) + t
            if seen <= 0:
                assert (out[0, t] == 0).all()
                assert lse[0, t].isneginf().all()
                continue
            want = v[:seen].double().mean(0)
            assert ((out[0, t].cpu().double() - want).abs() <= want.abs() * 2**-8 + 1e-7).all()
            assert (lse[0, t].cpu() - math.log2(seen)).abs().max() < 1e-4


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])
def test_32_every_shape(device, heads):
    """aiter#4752, vllm#45227: supported means right, and all of H x q is."""
    for q in range(1, 9):
        assert kbmla.supported(heads, q, device)
        batch = make_batch([150, 9], heads, q, device=device, seed=heads * 8 + q)
        m = BalancedMla(heads, device, False, clusters=8)
        m.require(q, 2)
        out, lse = new_out(batch)
        m.plan(q, batch.lengths)
        m.decode(batch.query, batch.cache, batch.block_table, batch.lengths, batch.scales, out, lse)
        assert_result(out, lse, *truth(batch))


def test_32_unsupported_shapes_fail_in_require(device):
    for heads, q in ((128, 9), (129, 1), (1, 1025), (12, 86)):
        assert not kbmla.supported(heads, q, device)
        with pytest.raises((ValueError, NotImplementedError)):
            BalancedMla(heads, device, False).require(q, 1)


# ---------------------------------------------------------------------------- F. DCP, LSE


def test_33_lse_is_base_two(device):
    """vllm#47079, sglang#33064, sglang#40903: 8 equal keys are 3.0 (2.079 is the wrong base)."""
    v = [probe_rows(0.0, torch.full((512,), x), n) for n, x in ((2, 1.0), (8, 0.0))]
    batch = probe_batch(v, 4, 1, device=device)
    out, lse = decode(core_for(batch), batch)
    assert (lse[1] == 3.0).all()
    assert (lse[0] == 1.0).all()
    merged, total = merge([(out[:1], lse[:1]), (out[1:], lse[1:])])
    assert (merged - 0.2).abs().max() < 1e-12
    assert (total - math.log2(10)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("world", "rank", "total", "counts"),
    [
        (2, 0, 6, [2, 2, 3, 3]),
        (2, 1, 6, [1, 2, 2, 3]),
        (8, 2, 5, [0, 1, 1, 1]),
        (8, 4, 5, [0, 0, 0, 1]),
        (8, 5, 5, [0, 0, 0, 0]),
        (8, 6, 5, [0, 0, 0, 0]),
        (8, 7, 5, [0, 0, 0, 0]),
    ],
)
def test_34_causal_bound_of_a_rank(device, world, rank, total, counts):
    """tokenspeed#364, flash-attention#93, ATOM#2118: the bound is global, then made local."""
    local = local_length(total, world, rank, 1)
    batch = probe_batch(
        [mark_rows(local)], 4, 4, device=device, totals=[total], cp=(world, rank, 1)
    )
    out, lse = decode(core_for(batch), batch)
    assert_marks(out, lse, 0, counts)


def dcp_parts(whole, query, world, device):
    parts = []
    for rank in range(world):
        rows = [shard(r, world, rank, 1) for r in whole]
        batch = make_batch(
            [r.shape[0] for r in rows],
            rows=rows,
            query=query,
            totals=[r.shape[0] for r in whole],
            cp=(world, rank, 1),
            device=device,
        )
        got = decode(core_for(batch), batch)
        assert_result(*got, *truth(batch))
        parts.append(got)
    return parts


def test_36_a_rank_without_tokens(device):
    """ATOM#1832, antgroup/sglang#29, vllm#54639: 0 times NaN in the merge, or no LSE at all."""
    whole = random_rows([2, 0, 9], seed=19)
    query = random_query(3, 2, 4, seed=20)
    parts = dcp_parts(whole, query, 4, device)
    for rank, want in enumerate([[1, 1], [0, 1], [0, 0], [0, 0]]):
        for t, seen in enumerate(want):
            assert bool(parts[rank][1][0, t].isneginf().all()) == (seen == 0)
    one = make_batch([2, 0, 9], rows=whole, query=query, device=device)
    ref_out, ref_lse = truth(one)
    out, lse = merge(parts)
    assert (out - ref_out).norm() <= NORM_BOUND * ref_out.norm()
    assert (lse - ref_lse)[~ref_lse.isneginf()].abs().max() < 2e-3
    assert (out[1] == 0).all()
    assert lse[1].isneginf().all()


def test_37_lse_by_index(device):
    """vllm#45426, #31166, aiter#4511: [B, S, H], not [B, H, S]. Refusals of wrong lengths are in
    test_errors; a stride-2 view is right or refused."""
    g = torch.Generator().manual_seed(21)
    a = torch.randint(-8, 9, (2, 3, 4), generator=g).float()
    rows = [probe_rows(torch.linspace(-4, 4, n), torch.ones(n, 512)) for n in (40, 700)]
    batch = probe_batch(rows, 4, 3, a=a, softmax=0.25, device=device)
    ref_lse = truth(batch)[1]
    for count in (1, 3):
        _, lse = decode(core_for(batch), batch, count)
        assert (lse.cpu() - ref_lse).abs().max() < 1e-3
    wide = torch.zeros(4, dtype=torch.int32, device=device)
    wide[::2] = batch.lengths
    with pytest.raises(ValueError, match="lengths"):
        decode(
            core_for(batch),
            replace(batch, lengths=wide[::2]),
            auto_plan(core_for(batch), batch.lengths),
        )


# ---------------------------------------------------------------------------- H. devices


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_42_second_device():
    """FlashMLA#158, #176, flashinfer#924: tensors on GPU 1 while GPU 0 is current."""
    need_cuda(2)
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    batch = make_batch([3000, 64, 0], 16, 2, device=second, seed=22)
    with torch.cuda.device(second):
        other = BalancedMla(16, second, False)
        other.require(2, 3)
        base = new_out(batch)
        other.plan(2, batch.lengths)
        args = (batch.query, batch.cache, batch.block_table, batch.lengths, batch.scales)
        other.decode(*args, *base)
    torch.cuda.set_device(first)
    before = torch.cuda.memory_stats(first).get("allocation.all.allocated", 0)
    m = BalancedMla(16, second, False)
    m.require(2, 3)
    for stream in (torch.cuda.current_stream(second), torch.cuda.Stream(second)):
        got = new_out(batch)
        torch.cuda.synchronize(second)
        with torch.cuda.stream(stream), torch.cuda.device(first):
            m.plan(2, batch.lengths)
            m.decode(*args, *got)
        torch.cuda.synchronize(second)
        assert_same(got, base)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_stats(first).get("allocation.all.allocated", 0) == before
    here = make_batch([3000, 64, 0], 16, 2, device=first, seed=22)
    assert_same(
        decode(core_for(here, clusters=64), here), decode(core_for(batch, clusters=64), batch)
    )


# ---------------------------------------------------------------------------- I. balance, memory


def cluster_loads(work: torch.Tensor, lengths: list[int], counts: list[int], clusters: int):
    """KV tiles that each cluster of the wave walks."""
    loads = [0] * clusters
    for i, entry in enumerate(valid_entries(work)):
        b, split = (entry >> 8) % len(lengths), entry & 255
        tiles = -(-max(lengths[b], 0) // TILE)
        per = -(-tiles // counts[b]) if tiles else 0
        loads[i % clusters] += max(min((split + 1) * per, tiles) - split * per, 0)
    return loads


@pytest.mark.parametrize("q", [1, 8])
def test_50_one_long_request(device, q):
    """flashinfer#3379, sglang#39968, vllm#27368: one long request must not set the time of the
    wave. 16 of 16 heads times 8 rows still is one q tile, planned like one."""
    lengths = [131072] + [1024] * 15
    core = make_core(16, q, 16, device, clusters=132, capacity=264, min_split_tokens=256)
    assert core.sizes.num_q_tiles == 1
    counts, work = auto_plan(core, i32(lengths, device))
    loads = cluster_loads(work, lengths, counts.tolist(), 132)
    assert max(loads) <= 1.25 * max(sum(loads) / 132, 1) + 1, (max(loads), sum(loads) / 132)
    uniform = [sum(lengths) // 16] * 16
    flat_counts, flat_work = auto_plan(core, i32(uniform, device))
    flat = cluster_loads(flat_work, uniform, flat_counts.tolist(), 132)
    assert max(loads) <= 1.3 * max(flat) + 1


def test_51_plan_ignores_capacity(device):
    """flash-attention#1000, flashinfer#3888: splits from the live length, in clusters of one wave.
    plan takes lengths alone, so the width of a table cannot reach it; results do not change."""
    narrow = make_batch([64], 16, 1, device=device, seed=23, columns=1)
    wide = make_batch([64], 16, 1, device=device, seed=23, columns=2048)
    core = make_core(16, 1, 1, device, clusters=132, capacity=264, min_split_tokens=256)
    assert planned_counts(core, narrow.lengths) == [1]
    assert_same(decode(core, wide), decode(core, narrow))
    for clusters in (1, 66, 132):
        wave = make_core(16, 1, 1, device, clusters=clusters, capacity=264, min_split_tokens=256)
        (count,) = planned_counts(wave, i32([32768], device))
        assert 1 <= count <= clusters


@pytest.mark.parametrize(("heads", "q"), [(16, 1), (128, 1), (96, 2), (128, 8)])
@pytest.mark.parametrize("requests", [1, 16, 512, 1024])
def test_53_workspace_has_one_budget(device, heads, q, requests):
    """aiter#3855, vllm-project/FlashMLA#19, vllm#57449: a cap per request times requests."""
    for clusters in (66, 132):
        for capacity in (264, 640, 10**6):
            core = make_core(heads, q, requests, device, clusters=clusters, capacity=capacity)
            tiles = core.sizes.num_q_tiles
            most = (requests * tiles + clusters) * 128 * 513 * 4 * 1.1
            assert core.workspace_bytes <= most


def test_53_unsplit_requests_use_no_workspace(device):
    """vllm-project/FlashMLA#19: with every count 1 the result is written directly."""
    batch = make_batch([300, 64, 0], 16, 1, device=device, seed=24)
    core = core_for(batch)
    workspace = new_workspace(core, device)
    decode(core, batch, 1, workspace=workspace)
    assert (workspace == NAN_BYTE).all()


@pytest.mark.gpu
def test_53_no_allocation(cuda):
    """aiter#3855, vllm#57449: 100 steady steps take no memory from torch's allocator."""
    batch = make_batch([9000, 64, 0], 16, 2, device=cuda, seed=25)
    m = BalancedMla(16, cuda, False)
    m.require(2, 3)
    out, lse = new_out(batch)

    def step() -> None:
        m.plan(2, batch.lengths)
        m.decode(batch.query, batch.cache, batch.block_table, batch.lengths, batch.scales, out, lse)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(cuda)["allocation.all.allocated"]
    for _ in range(100):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats(cuda)["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_54_no_synchronisation(cuda):
    """sglang#27689, flashinfer#5264, aiter#3465: the plan copies nothing to the host, and one
    planner launch serves all layers."""
    batch = make_batch([9000, 64, 0], 16, 2, device=cuda, seed=26)
    m = BalancedMla(16, cuda, False)
    m.require(2, 3)
    out, lse = new_out(batch)

    def step() -> None:
        m.plan(2, batch.lengths)
        for _ in range(4):
            m.decode(
                batch.query, batch.cache, batch.block_table, batch.lengths, batch.scales, out, lse
            )

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
    assert not [n for n in names if "memcpy" in n.lower()]
    assert len([n for n in names if "plan" in n.lower()]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 64, 512])
def test_54_plan_time(cuda, requests):
    """sglang#27689, flashinfer#5264: a replayed plan takes 10 us at most."""
    m = BalancedMla(16, cuda, False)
    m.require(1, requests)
    lengths = torch.randint(1, 100_000, (requests,), dtype=torch.int32, device=cuda)
    m.plan(1, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            m.plan(1, lengths)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 10)  # ms of 100 plans to us of one
    assert sorted(times)[5] <= 10.0


def test_54_one_plan_call_is_one_op(cpu):
    """The host's half of sglang#27689: a plan call reaches torch once, with no copy beside it."""
    core = make_core(16, 1, 8, cpu)
    lengths = i32([4000] * 8, cpu)
    counts, work = auto_plan(core, lengths)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        core.plan(lengths, counts, work)
    assert [e.name for e in profile.events()] == ["kbmla::plan"]


def test_20_counts_never_exceed_tiles(device):
    """No plan makes a split without tokens of its request."""
    for policy in ("balanced", "equal", "fixed"):
        core = make_core(16, 4, 6, device, policy=policy)
        lengths = [1, 127, 128, 129, 5000, 0]
        for n, c in zip(lengths, planned_counts(core, i32(lengths, device)), strict=True):
            assert c == normal_count(n, c), (policy, n, c)


def test_37_probe_queries_differ(device):
    """The probe of test_37 tells rows and heads apart: a transposed LSE would not pass it."""
    query = probe_query(1, 2, 2, torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    assert query[0, :, :, 512].float().tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_06_probe_is_elementwise(device):
    """Equal weights over poisoned pages: the mean to BF16."""
    rows = [probe_rows(0.0, torch.arange(512).float() % 5, n) for n in (1, 64, 65, 200)]
    batch = probe_batch(rows, 4, 1, device=device)
    assert_probe(*decode(core_for(batch), batch, 2), *truth(batch))
