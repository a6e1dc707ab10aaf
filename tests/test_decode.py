# SPDX-License-Identifier: Apache-2.0
"""Decode against float64 attention over the whole of the supported range, and what must not change
a result: split counts (beyond rounding), threads, repeats, neighbours, strides, poison."""

from __future__ import annotations

import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import (
    FP8,
    NAN_BYTE,
    Batch,
    Fence,
    auto_plan,
    core_for,
    cpu_isa,
    decode,
    expected_marks,
    guarded,
    in_child,
    make_batch,
    make_core,
    manual_plan,
    mark_counts,
    mark_rows,
    new_out,
    new_workspace,
    normal_count,
    probe_batch,
    probe_rows,
    random_query,
    valid_entries,
)
from compare import (
    NORM_BOUND,
    assert_bitwise,
    assert_probe,
    assert_result,
    assert_same,
    gaussian_bounds,
    norm_error,
    truth,
)
from hypothesis import given, settings
from hypothesis import strategies as st

# ---------------------------------------------------------------------------- against float64


@pytest.mark.parametrize(
    ("heads", "q", "page", "lengths"),
    [
        (1, 1, 64, [129, 127]),
        (6, 8, 128, [260, 8]),
        (12, 1, 64, [700, 1, 64, 65]),
        (16, 4, 64, [0, 3, 129]),
        (20, 3, 16, [1000, 40, 2]),
        (64, 1, 1, [300, 7]),
        (96, 5, 64, [3, 700, 0]),
        (127, 2, 256, [300]),
        (128, 1, 32, [513]),
        (128, 8, 64, [300]),
        (3, 7, 2, [33, 250]),
        (48, 2, 8, [128, 129]),
    ],
)
def test_shapes(device, heads, q, page, lengths):
    batch = make_batch(lengths, heads, q, page=page, device=device, seed=heads + q)
    reference = truth(batch)
    core = core_for(batch)
    assert_result(*decode(core, batch), *reference)
    assert_result(*decode(core, batch, 1), *reference)
    assert_result(*decode(core, batch, 256), *reference)


@pytest.mark.slow
@pytest.mark.parametrize("length", [4095, 4096, 4097, 33_333, 100_000])
def test_long_requests(device, length):
    batch = make_batch([length, 70], 16, 1, device=device, seed=length)
    assert_result(*decode(core_for(batch), batch), *truth(batch))


@settings(max_examples=150)
@given(
    heads=st.integers(1, 128),
    q=st.integers(1, 8),
    page=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]),
    lengths=st.lists(
        st.one_of(
            st.integers(-3, 300), st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 256, 257, 900])
        ),
        min_size=1,
        max_size=5,
    ),
    clusters=st.sampled_from([1, 2, 7, 132]),
    min_split_tokens=st.sampled_from([1, 128, 256, 1000]),
    capacity=st.sampled_from([0, 1, 3, 64, 1024]),
    policy=st.sampled_from(["balanced", "equal", "fixed"]),
    partial_fp16=st.booleans(),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_plan(
    device,
    heads,
    q,
    page,
    lengths,
    clusters,
    min_split_tokens,
    capacity,
    policy,
    partial_fp16,
    causal,
    seed,
):
    """Any supported shape under any planner setting agrees with float64."""
    batch = make_batch(lengths, heads, q, page=page, device=device, seed=seed)
    core = core_for(
        batch,
        clusters=clusters,
        min_split_tokens=min_split_tokens,
        capacity=capacity,
        policy=policy,
        partial_fp16=partial_fp16,
        causal=causal,
    )
    assert_result(*decode(core, batch), *truth(batch, causal), **gaussian_bounds(batch))


@settings(max_examples=60)
@given(
    heads=st.integers(1, 40),
    q=st.integers(1, 8),
    lengths=st.lists(st.integers(0, 1500), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 256), min_size=4, max_size=4),
    a_seed=st.integers(0, 2**16),
)
def test_every_split_is_exact_on_a_mean(device, heads, q, lengths, counts, a_seed):
    """Equal weights leave no P rounding: any split gives the mean to BF16 and log2(n) to 1e-4."""
    g = torch.Generator().manual_seed(a_seed)
    rows = [
        probe_rows(1.0, torch.randint(-3, 4, (n, 512), generator=g) * 0.5 + 2.0, n) for n in lengths
    ]
    batch = probe_batch(rows, heads, q, a=0.0, device=device)
    assert_probe(*decode(core_for(batch), batch, counts[: len(lengths)]), *truth(batch))


# ---------------------------------------------------------------------------- split counts


def test_counts_agree_within_rounding(device):
    """Another count changes which maximum each P was rounded against, never the sum: two results
    lie within twice the bound of one, and their lse within FP32 rounding."""
    batch = make_batch([5000, 130, 1024], 16, 2, device=device, seed=5)
    core = core_for(batch)
    base = decode(core, batch, 1)
    for count in (2, 3, 7, 16, 40):
        got = decode(core, batch, count)
        assert norm_error(got[0], base[0]) <= 2 * NORM_BOUND
        assert (got[1] - base[1]).abs().max() < 1e-4


def test_order_of_entries_is_free(device):
    """Which cluster takes an entry, and when, is no input of the result."""
    batch = make_batch([900, 300, 0, 2000], 96, 3, device=device, seed=6)
    core = core_for(batch)
    counts, work = manual_plan(core, batch.lengths, [4, 2, 1, 9])
    base = decode(core, batch, (counts, work))
    entries = len(valid_entries(work))
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        shuffled = work.clone()
        shuffled[:entries] = work[:entries][torch.randperm(entries, generator=g).to(work.device)]
        assert_same(decode(core, batch, (counts, shuffled)), base)


@pytest.mark.parametrize("clusters", [1, 2, 7, 132, 4096])
def test_any_wave_width(device, clusters):
    batch = make_batch([3000, 0, 129, 64], 96, 2, device=device, seed=7)
    core = core_for(batch, clusters=clusters, capacity=512)
    assert core.clusters == clusters
    assert_result(*decode(core, batch), *truth(batch))


def test_default_wave_width(cpu):
    """On the CPU the wave is as wide as torch has threads."""
    assert make_core(16, 1, 1, cpu, clusters=None).clusters == torch.get_num_threads()


def test_most_splits(device):
    """256 splits of one request, the most an entry can number."""
    batch = make_batch([256 * 128], 8, 1, device=device, seed=8)
    core = core_for(batch, clusters=300)
    counts, work = manual_plan(core, batch.lengths, 256)
    assert counts[0] == 256
    assert_result(*decode(core, batch, (counts, work)), *truth(batch))


# ---------------------------------------------------------------------------- reproducible


def test_repeats_are_bitwise_equal(device):
    batch = make_batch([4000, 77, 0, 1300], 96, 4, device=device, seed=9)
    core = core_for(batch)
    plan = auto_plan(core, batch.lengths)
    base = decode(core, batch, plan)
    for fill in (0x00, 0xFF, NAN_BYTE, 0x3C):
        workspace = new_workspace(core, device, fill)
        assert_same(decode(core, batch, plan, workspace=workspace), base, f"workspace {fill:#x}")
        assert_same(decode(core, batch, plan, workspace=workspace), base, "workspace reused")


def test_threads_do_not_change_a_result(cpu, threads):
    """One and many threads under the same plan: bitwise. The plan itself depends on the threads
    only where the wave width is left to default."""
    batch = make_batch([4000, 77, 0, 1300], 20, 3, device=cpu, seed=10)
    core = core_for(batch)
    results = []
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        results.append((auto_plan(core, batch.lengths), decode(core, batch)))
    for plan, result in results[1:]:
        assert_bitwise(plan[0], results[0][0][0], "counts")
        assert_bitwise(plan[1], results[0][0][1], "work")
        assert_same(result, results[0][1])


def test_several_callers(cpu):
    """Python threads that decode at once on buffers of their own get what one alone gets."""
    batches = [make_batch([2000 + i, 70, 300], 12, 2, device=cpu, seed=i) for i in range(4)]
    core = core_for(batches[0])
    base = [decode(core, batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for got, want in zip(pool.map(lambda b: decode(core, b), batches), base, strict=True):
                assert_same(got, want)


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_instruction_set(cpu, isa):
    """Each instruction set the machine has stays within the bounds and repeats itself."""
    with cpu_isa(isa) as have:
        if not have:
            pytest.skip(f"this CPU has no {isa}")
        for heads, q, page in [(16, 1, 64), (5, 3, 16), (128, 1, 256), (96, 2, 1)]:
            batch = make_batch([700, 129, 0, 5], heads, q, page=page, device=cpu, seed=heads)
            core, reference = core_for(batch), truth(batch)
            for count in (1, 5):
                got = decode(core, batch, count)
                assert_result(*got, *reference)
                assert_same(decode(core, batch, count), got)


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_instruction_set_never_reads_what_it_masks(cpu, isa):
    """FlashMLA#11, flashinfer#941: on each instruction set NaN beyond a length changes no bit."""
    with cpu_isa(isa) as have:
        if not have:
            pytest.skip(f"this CPU has no {isa}")
        lengths = [1, 13, 65, 127, 129, 200]
        poisoned = make_batch(lengths, 16, 3, device=cpu, seed=11)
        clean = make_batch(lengths, 16, 3, device=cpu, seed=11, poison=0, unused=0)
        core = core_for(clean)
        assert_same(decode(core, poisoned, 2), decode(core, clean, 2))


def test_a_result_depends_on_neighbours_only_through_its_count(device):
    """Each request of a batch, alone with the same count: the same bits."""
    lengths = [2500, 3, 0, 640, 128, 5001]
    counts = [6, 1, 1, 5, 1, 13]
    batch = make_batch(lengths, 12, 4, device=device, seed=12)
    core = core_for(batch)
    out, lse = decode(core, batch, counts)
    for b, count in enumerate(counts):
        solo = batch.solo(b)
        got = decode(core_for(solo), solo, count)
        assert_same(got, (out[b : b + 1], lse[b : b + 1]), f"request {b}")


def test_fixed_policy_is_batch_invariant(device):
    """Under `fixed` a request's count, and so every bit of its result, ignores the batch."""
    lengths = [9000, 400, 70, 0, 2222]
    batch = make_batch(lengths, 16, 2, device=device, seed=13)
    out, lse = decode(core_for(batch, policy="fixed", min_split_tokens=256), batch)
    for b in range(len(lengths)):
        solo = batch.solo(b)
        got = decode(
            make_core(16, 2, len(lengths), device, policy="fixed", min_split_tokens=256), solo
        )
        assert_same(got, (out[b : b + 1], lse[b : b + 1]), f"request {b}")


# ---------------------------------------------------------------------------- pages


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_page_sizes_are_bitwise_the_same(device, page):
    """How keys are paged is no input of the arithmetic."""
    rows = make_batch([700, 129, 1, 0, 256], seed=14).rows
    query = random_query(5, 2, 12, 15)
    kwargs = {"rows": rows, "query": query, "device": device}
    lengths = [r.shape[0] for r in rows]
    one = make_batch(lengths, page=page, seed=1, **kwargs)
    base = make_batch(lengths, page=64, seed=2, **kwargs)
    core = core_for(base)
    for count in (1, 4):
        assert_same(decode(core, one, count), decode(core, base, count))


def test_shared_pages(device):
    """Prefix caching: requests may list the same pages."""
    batch = make_batch([512, 300, 64], 16, 1, device=device, seed=16)
    table = batch.block_table.clone()
    table[1, :5] = table[0, :5]
    table[2, :1] = table[0, :1]
    shared = replace(batch, block_table=table)
    assert_result(*decode(core_for(shared), shared), *truth(shared))


def test_length_beyond_the_table_counts_as_the_table(device):
    """A length that its table row cannot hold is cut to it, and never read past it."""
    full = probe_batch([mark_rows(128), mark_rows(64)], 8, 1, columns=2, device=device)
    core = core_for(full)
    base = decode(core, full, 1)
    longer = replace(full, lengths=torch.tensor([129, 64], dtype=torch.int32, device=device))
    assert_same(decode(core, longer, 1), base)


# ---------------------------------------------------------------------------- strides


def strided_batch(batch: Batch) -> Batch:
    """The same values behind other strides: query transposed, cache rows of 640 bytes inside pages
    of a larger buffer, table cut from a wider one."""
    b, _q, _heads = batch.shape
    device = batch.query.device
    query = (
        batch.query.view(torch.uint8).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).view(FP8)
    )
    pages, page, _ = batch.cache.shape
    wide = torch.full((pages, page + 3, 640), NAN_BYTE, dtype=torch.uint8, device=device)
    wide[:, :page, 32:608] = batch.cache.view(torch.uint8)
    cache = wide.view(FP8)[:, :page, 32:608]
    columns = batch.block_table.shape[1]
    table = torch.full((b, columns + 5), 2**30, dtype=torch.int32, device=device)
    table[:, 2 : 2 + columns] = batch.block_table
    assert not (query.is_contiguous())
    assert not (cache.is_contiguous())
    return replace(batch, query=query, cache=cache, block_table=table[:, 2 : 2 + columns])


@pytest.mark.parametrize(("heads", "q"), [(12, 2), (96, 3)])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("page", [16, 64, 256])
def test_strides_are_honoured(device, heads, q, count, page):
    """FlagGems#5235, aiter#3841: query, cache, table, out and lse behind other strides."""
    batch = make_batch([700, 5, 300], heads, q, page=page, device=device, seed=17)
    core = core_for(batch)
    base = decode(core, batch, count)
    b = 3
    out = torch.full((b, heads, q + 1, 640), math.nan, dtype=torch.bfloat16, device=device)
    lse = torch.full((q, b, heads, 3), math.nan, dtype=torch.float32, device=device)
    out_view = out[:, :, :q, 64:576].transpose(1, 2)
    lse_view = lse[..., 1].permute(1, 0, 2)
    decode(core, strided_batch(batch), count, out=out_view, lse=lse_view)
    assert_same((out_view, lse_view), base)
    out_view.fill_(math.nan)
    lse_view.fill_(math.nan)
    assert out.isnan().all(), "written outside the view"
    assert lse.isnan().all(), "written outside the view"


@pytest.mark.parametrize("transposed", [False, True])
def test_three_dimensional_query(device, transposed):
    """The core takes query, out and lse with B*q merged, as callers may hold them; a query that
    is a transpose of [heads, B*q, 576] is read by its strides."""
    batch = make_batch([100, 300], 12, 3, device=device, seed=18)
    core = core_for(batch)
    query = batch.query.reshape(6, 12, 576)
    if transposed:
        by_head = query.view(torch.uint8).transpose(0, 1).contiguous()
        query = by_head.transpose(0, 1).view(FP8)
    out, lse = new_out(batch)
    result = core.decode(
        query,
        batch.cache,
        batch.block_table,
        batch.lengths,
        *batch.scales,
        *auto_plan(core, batch.lengths),
        new_workspace(core, device),
        lse=lse.view(6, 12),
        out=out.view(6, 12, 512),
    )
    assert result.data_ptr() == out.data_ptr()
    assert result.shape == (6, 12, 512)
    assert_same((out, lse), decode(core, batch))


def test_core_makes_out_where_none_is_given(device):
    batch = make_batch([100, 300], 12, 3, device=device, seed=18)
    core = core_for(batch)
    args = (batch.cache, batch.block_table, batch.lengths, *batch.scales)
    plan, workspace = auto_plan(core, batch.lengths), new_workspace(core, device)
    out = core.decode(batch.query, *args, *plan, workspace)
    assert_bitwise(out, decode(core, batch)[0])


def test_values_of_any_bit_pattern(device):
    """Every finite E4M3 byte in query, key and value, subnormals and -0 among them."""
    g = torch.Generator().manual_seed(19)
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    rows = [codes[torch.randint(0, 254, (n, 576), generator=g)].view(FP8) for n in (500, 40)]
    query = codes[torch.randint(0, 254, (2, 2, 16, 576), generator=g)].view(FP8)
    # Raw scores reach millions here; the scale brings their spread back to a few log2.
    batch = make_batch([500, 40], rows=rows, query=query, scales=(2.0**-18, 1.0), device=device)
    assert_result(*decode(core_for(batch), batch, 3), *truth(batch))


def test_huge_negative_scores(device):
    """Valid raw scores reach -1.3e7: masking is by -inf, no finite stand-in can undercut them."""
    rows = torch.full((200, 576), -448.0)
    rows[:, 0] = torch.linspace(-440, -448, 200)
    query = torch.full((1, 2, 8, 576), 448.0)
    batch = make_batch(
        [200], rows=[rows.to(FP8)], query=query.to(FP8), scales=(1e-3, 1.0), device=device
    )
    reference = truth(batch)
    # |score * scale| is 1.2e5 in log2 units, where FP32 keeps steps of 2^-7.
    assert_result(*decode(core_for(batch), batch, 1), *reference, lse_bound=2.0**-5)
    assert_result(*decode(core_for(batch), batch, 2), *reference, lse_bound=2.0**-5)


# ---------------------------------------------------------------------------- lengths


@pytest.mark.parametrize("q", [1, 2, 5, 8])
def test_counts_of_visible_tokens(device, q):
    """Each row sees exactly the tokens before and with its own, at every edge of a tile."""
    lengths = [1, 2, 5, 7, 127, 128, 129, 130, 255, 256, 257, 384]
    batch = probe_batch([mark_rows(n) for n in lengths], 6, q, device=device)
    core = core_for(batch)
    for count in (1, 2, 3):
        out, lse = decode(core, batch, count)
        for b, n in enumerate(lengths):
            for t in range(q):
                seen = max(n - (q - 1) + t, 0)
                if seen == 0:
                    assert lse[b, t].isneginf().all()
                    assert (out[b, t] == 0).all()
                    continue
                assert (lse[b, t].cpu() - math.log2(seen)).abs().max() < 1e-4, (b, t)
                assert (mark_counts(out[b, t], lse[b, t]) == expected_marks(seen)).all(), (b, t)


def test_without_the_causal_mask(device):
    lengths = [1, 128, 130]
    batch = probe_batch([mark_rows(n) for n in lengths], 6, 4, device=device)
    _, lse = decode(core_for(batch, causal=False), batch, 2)
    want = torch.tensor(lengths).double().log2()[:, None, None]
    assert (lse.cpu() - want).abs().max() < 1e-4


@pytest.mark.parametrize("lengths", [[-1], [-(2**31)], [0, 0, 0], [5, -7, 300]])
def test_negative_and_zero_lengths(device, lengths):
    batch = make_batch(lengths, 16, 2, device=device, seed=20)
    core = core_for(batch)
    for plan in (None, 1, 4):
        assert_result(*decode(core, batch, plan), *truth(batch))


def test_no_table_columns(device):
    """A batch whose requests are all empty may come with a table of no columns and no pages."""
    batch = make_batch([0, 0], 16, 1, device=device, columns=0)
    batch = replace(batch, cache=batch.cache[:0])
    out, lse = decode(core_for(batch), batch)
    assert (out == 0).all()
    assert lse.isneginf().all()


def test_lengths_are_read_on_the_device_at_decode(device):
    """The plan may be older than the lengths: what decode reads is what counts."""
    batch = make_batch([300, 200], 16, 1, device=device, seed=21)
    core = core_for(batch)
    plan = manual_plan(core, batch.lengths, [3, 2])
    shorter = replace(batch, lengths=torch.tensor([260, 150], dtype=torch.int32, device=device))
    assert_result(*decode(core, shorter, plan), *truth(shorter))


# ---------------------------------------------------------------------------- stale and foreign


def fenced_child(at_end: bool, seed: int) -> None:
    """Decodes from tensors that end, or begin, at memory without access rights."""
    fence = Fence(at_end)
    g = torch.Generator().manual_seed(seed)
    shapes = [(16, 1, 64), (12, 3, 16), (128, 1, 1), (96, 2, 256), (1, 8, 64), (20, 1, 128)]
    for heads, q, page in shapes:
        lengths = [1, 0, page, 129, -1, 257]
        need = -(-257 // page)
        plain = make_batch(lengths, heads, q, page=page, columns=need, seed=seed)
        # The cache ends with the last listed page, at the slot of the last token.
        pages = int(plain.block_table[:, :need][plain.block_table[:, :need] < 2**29].max()) + 1
        first = 2 if not at_end else 0
        table = torch.where(plain.block_table < 2**29, plain.block_table - first, 2**30)
        batch = replace(
            plain,
            query=fence(plain.query),
            cache=fence(plain.cache[first:pages]),
            block_table=fence(table),
            lengths=fence(plain.lengths),
        )
        core = core_for(plain)
        base = decode(core, plain, 2)
        for plan in (None, 2):
            counts, work = (
                auto_plan(core, batch.lengths)
                if plan is None
                else manual_plan(core, plain.lengths, 2)
            )
            out, lse = (fence(x) for x in new_out(plain))
            workspace = fence(new_workspace(core, "cpu"))
            if workspace.data_ptr() % 256:
                workspace = new_workspace(core, "cpu")
            fenced = (fence(counts), fence(work))
            if plan is None:
                core.plan(batch.lengths, *fenced)
            decode(core, batch, fenced, workspace=workspace, out=out, lse=lse)
            if plan is not None:
                assert_same((out, lse), base)
        # Garbage plans: whatever they say, nothing outside is touched and the call returns.
        for kind in range(12):
            counts, work = garbage_plan(core, batch, g, kind)
            decode(core, batch, (fence(counts), fence(work)), workspace=workspace)


def garbage_plan(core, batch: Batch, g: torch.Generator, kind: int):
    """Plans that no planner wrote: random words of several sizes, extremes, a written plan with
    other counts, slots or q tiles."""
    i32 = {"dtype": torch.int32}
    n, m = core.list_len, core.max_requests
    low, high = -(2**31), 2**31 - 1
    counts = torch.randint(low, high, (m,), generator=g).to(torch.int32)
    work = torch.randint(low, high, (n,), generator=g).to(torch.int32)
    if kind == 1:
        work = torch.full((n,), high, **i32)
    elif kind == 2:
        work = torch.full((n,), low, **i32)
        counts = torch.zeros(m, **i32)
    elif kind == 3:
        work = torch.randint(0, 1 << 12, (n,), generator=g).to(torch.int32)
        counts = torch.randint(0, 5, (m,), generator=g).to(torch.int32)
    elif kind == 4:
        work = torch.zeros(n, **i32)
        counts = torch.full((m,), 256, **i32)
    elif kind == 5:
        work, counts = torch.arange(n, **i32), torch.full((m,), high, **i32)
    elif kind == 6:
        work, counts = torch.full((n,), 255, **i32), torch.full((m,), -1, **i32)
    elif kind >= 7:
        counts, work = (t.clone() for t in manual_plan(core, batch.lengths.clone(), 2))
        tail = n - m
        if kind == 7:
            work[tail:] = torch.randint(low, high, (m,), generator=g).to(torch.int32)
        elif kind == 8:
            counts = torch.randint(1, 257, (m,), generator=g).to(torch.int32)
        elif kind == 9:
            work[tail:] = ~torch.full((m,), core.sizes.max_partials - 1, **i32)
        elif kind == 10:
            work[:tail] += 256 * 3
        elif kind == 11:
            work[tail:] = low
            counts[:] = 2
    return counts, work


@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_outside_is_touched(cpu, at_end):
    """FlashMLA#11, vllm#56862, flashinfer#4365, DeepGEMM#344: every input and output ends at memory
    without access rights, with the planner's, a written and twelve garbage plans."""
    in_child("test_decode", "fenced_child", at_end, 3, seconds=60)


@pytest.mark.parametrize("kind", range(12))
def test_garbage_plans_stay_inside(device, kind):
    """A foreign plan may leave results undefined; it never hangs and never writes elsewhere."""
    g = torch.Generator().manual_seed(kind)
    batch = make_batch([300, 0, 1000, 64], 96, 2, device="cpu", seed=22)
    core = core_for(batch)
    counts, work = garbage_plan(core, batch, g, kind)
    batch = replace(
        batch,
        query=batch.query.to(device),
        cache=batch.cache.to(device),
        block_table=batch.block_table.to(device),
        lengths=batch.lengths.to(device),
    )
    core = core_for(batch)
    fresh_out, fresh_lse = new_out(batch)
    plan = (counts.to(device), work.to(device))
    kept = (plan[0].clone(), plan[1].clone(), batch.query.clone(), batch.block_table.clone())
    with (
        guarded(fresh_out) as out,
        guarded(fresh_lse) as lse,
        guarded(new_workspace(core, device)) as workspace,
    ):
        decode(core, batch, plan, workspace=workspace, out=out, lse=lse)
    now = (plan[0], plan[1], batch.query, batch.block_table)
    for before, after in zip(kept, now, strict=True):
        assert_bitwise(after, before, "an input")
    # The core is as good as new for the next plan.
    assert_result(*decode(core, batch), *truth(batch))


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
@pytest.mark.parametrize("count", [1, 2])
def test_nan_of_a_neighbour_stays_there(cpu, isa, count):
    """flashinfer#941: a worker that has read NaN in the last keys of one request's tile goes on to
    shorter requests in the same scratch. On one cluster, so that it is one worker."""
    with cpu_isa(isa) as have:
        if not have:
            pytest.skip(f"this CPU has no {isa}")
        batch = make_batch([256, 5, 130, 256, 1], 16, 2, page=1, device=cpu, seed=25)
        core = core_for(batch, clusters=1)
        base = decode(core, batch, [count, 1, 1, count, 1])
        cache = batch.cache.clone()
        for b in (0, 3):
            cache.view(torch.uint8)[batch.block_table[b, 8:256].long()] = NAN_BYTE
        out, lse = decode(core, replace(batch, cache=cache), [count, 1, 1, count, 1])
        for b in (1, 2, 4):
            assert_same((out[b], lse[b]), (base[0][b], base[1][b]), f"request {b}")
        assert out[0].isnan().any()
        assert out[3].isnan().any()


@pytest.mark.parametrize("heads", [10, 16])
def test_rows_without_keys_are_zero_whatever_the_values_are(device, heads):
    """q > length on a page outside the cache, which reads as NaN: rows that see no key are 0 by
    selection, not by a product with P = 0; the others are NaN."""
    batch = make_batch([2, 300], heads, 4, device=device)
    batch.block_table[0, 0] = batch.cache.shape[0]
    out, lse = decode(core_for(batch), batch)
    assert not out[0, :2].any()
    assert torch.isneginf(lse[0, :2]).all()
    assert out[0, 2:].isnan().all()
    assert lse[0, 2:].isnan().all()
    assert out[1].isfinite().all()


def test_page_ids_outside_the_cache(device):
    """A table entry inside a request's length that names no page of the cache must not be followed;
    the neighbours' results stay."""
    batch = make_batch([200, 300], 16, 1, device=device, seed=23)
    core = core_for(batch)
    base = decode(core, batch, 2)
    for bad in (-1, 2**30, batch.cache.shape[0], -(2**31), 2**31 - 1):
        table = batch.block_table.clone()
        table[0, 1] = bad
        out, lse = decode(core, replace(batch, block_table=table), 2)
        assert_same((out[1:], lse[1:]), (base[0][1:], base[1][1:]))


# ---------------------------------------------------------------------------- memory


def test_steady_steps_allocate_nothing(cpu):
    """FlashMLA#19, aiter#3855: plan and decode take no memory from torch's allocator."""
    batch = make_batch([3000, 64], 16, 2, device=cpu, seed=24)
    core = core_for(batch)
    counts, work = auto_plan(core, batch.lengths)
    workspace, (out, lse) = new_workspace(core, cpu), new_out(batch)

    def step() -> None:
        core.plan(batch.lengths, counts, work)
        core.decode(
            batch.query,
            batch.cache,
            batch.block_table,
            batch.lengths,
            *batch.scales,
            counts,
            work,
            workspace,
            lse=lse,
            out=out,
        )

    step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        for _ in range(3):
            step()
    taken = {e.name: e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage}
    assert not taken, taken

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    # And none beside it: a leak of 5 KiB a step would show.
    before = resident()
    for _ in range(200):
        step()
    assert resident() - before <= 2**20


def test_a_count_per_request_that_is_not_normal(device):
    """A plan whose count leaves splits empty is walked by the normalised count: no lost token."""
    batch = probe_batch([mark_rows(640), mark_rows(100)], 8, 1, device=device)
    core = core_for(batch)
    counts, work = manual_plan(core, batch.lengths, [3, 1])
    assert counts[0] == normal_count(640, 4) == 3
    counts = counts.clone()
    counts[0] = 4
    out, lse = new_out(batch)
    decode(core, batch, (counts, work), out=out, lse=lse)
    for b, n in enumerate((640, 100)):
        assert (mark_counts(out[b], lse[b]) == expected_marks(n)).all()
