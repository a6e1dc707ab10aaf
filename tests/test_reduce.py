# SPDX-License-Identifier: Apache-2.0
"""The merge alone: of what decode left in the workspace, and of partials written by hand, whose
layout csrc/rules.h states: partial_o [slots, q_tile_rows, 512], then partial_lse [slots, rows]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from cases import (
    NAN_BYTE,
    Plan,
    core_for,
    decode,
    guarded,
    make_batch,
    make_core,
    manual_plan,
    new_workspace,
)
from compare import assert_same, merge
from hypothesis import given, settings
from hypothesis import strategies as st

from kbmla import ops, reference


@dataclass
class Partials:
    """Views of one workspace and the plan that says which slot is whose."""

    workspace: torch.Tensor
    o: torch.Tensor  # [slots, q_tile_rows, 512] f32 or f16
    lse: torch.Tensor  # [slots, q_tile_rows] f32


def partials(core, device) -> Partials:
    """A NaN workspace of a core, seen as its partials."""
    sizes = core.sizes
    workspace = new_workspace(core, device)
    slots, rows = sizes.max_partials, sizes.q_tile_rows
    kind = torch.float16 if core.config.partial_fp16 else torch.float32
    o_bytes = slots * rows * 512 * kind.itemsize
    o = workspace[:o_bytes].view(kind).view(slots, rows, 512)
    lse = workspace[sizes.partial_lse_offset :].view(torch.float32).view(slots, rows)
    return Partials(workspace, o, lse)


def slot_of(core, plan: Plan, b: int, tile: int, split: int) -> int:
    base = ~int(plan[1][core.list_len - core.max_requests + b])
    return base + tile * int(plan[0][b]) + split


def reduce(core, lengths: torch.Tensor, plan: Plan, workspace: torch.Tensor, scale: float = 1.0):
    requests, device = lengths.numel(), lengths.device
    shape = (requests, core.q, core.heads)
    out = torch.full((*shape, 512), 7.0, dtype=torch.bfloat16, device=device)
    lse = torch.full(shape, 7.0, dtype=torch.float32, device=device)
    ops.reduce(lengths, *plan, workspace, out, lse, scale, 2**31 - 1, core.config)
    return out, lse


def ints(values: list[int], device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("partial_fp16", [False, True])
def test_repeats_the_merge_of_decode(device, partial_fp16):
    """What decode left behind merges to the same bits again; unsplit requests are left alone."""
    batch = make_batch([900, 100, 2000, 0], 96, 2, device=device, seed=1, scales=(0.06, 1.5))
    core = core_for(batch, partial_fp16=partial_fp16)
    plan = manual_plan(core, batch.lengths, [4, 1, 7, 1])
    workspace = new_workspace(core, device)
    base = decode(core, batch, plan, workspace=workspace)
    before = workspace.clone()
    out, lse = reduce(core, batch.lengths, plan, workspace, 1.5)
    for b in (0, 2):
        assert_same((out[b], lse[b]), (base[0][b], base[1][b]))
    assert (out[1] == 7).all()
    assert (lse[1] == 7).all()
    assert torch.equal(workspace, before), "reduce writes no workspace"


@pytest.mark.parametrize(
    ("heads", "q", "counts"),
    [
        (12, 1, [13, 2, 20, 8]),
        (64, 1, [9, 1, 30, 5]),
        (128, 2, [13, 8, 9, 1]),
        (2, 1, [[1, 1, 1, 9, 1, 2, 1, 1, 20, 1, 8][b % 11] for b in range(700)]),
    ],
)
def test_a_merge_ignores_its_neighbours(device, heads, q, counts):
    """Requests of up to 8 splits and of more, few rows and many, more requests than threads of a
    block: each as in float64, and alone the same bits."""
    g = torch.Generator().manual_seed(heads)
    capacity = sum(counts) * -(-heads * q // 64)
    core = make_core(heads, q, len(counts), device, capacity=capacity)
    lengths = ints([count * 128 for count in counts], device)
    plan = manual_plan(core, lengths, counts)
    memory = partials(core, device)
    memory.o.copy_(torch.randn(memory.o.shape, generator=g))
    memory.lse.copy_(torch.randn(memory.lse.shape, generator=g) * 3)
    out, lse = reduce(core, lengths, plan, memory.workspace)
    split = [b for b, count in enumerate(counts) if count > 1]
    for b in split[:12] + split[12::29]:
        solo = make_core(heads, q, 1, device, capacity=capacity)
        solo_plan = manual_plan(solo, lengths[b : b + 1], counts[b : b + 1])
        own = partials(solo, device)
        rows = core.sizes.q_tile_rows
        parts = []
        for i in range(counts[b]):
            o, sums = [], []
            for tile in range(core.sizes.num_q_tiles):
                slot = slot_of(core, plan, b, tile, i)
                to = slot_of(solo, solo_plan, 0, tile, i)
                own.o[to], own.lse[to] = memory.o[slot], memory.lse[slot]
                valid = min(rows, heads * q - tile * rows)
                o.append(memory.o[slot, :valid])
                sums.append(memory.lse[slot, :valid])
            parts.append((torch.cat(o), torch.cat(sums)))
        want, want_lse = merge(parts)
        got = reduce(solo, lengths[b : b + 1], solo_plan, own.workspace)
        assert_same(got, (out[b : b + 1], lse[b : b + 1]), f"request {b}")
        # BF16 of sums of up to 30 terms of size 1: half a unit, and FP32 rounding beside it.
        error = (out[b].view(heads * q, 512).cpu().double() - want).abs()
        assert (error <= want.abs() * 2.0**-8 + 1e-5).all()
        assert (lse[b].view(-1).cpu().double() - want_lse).abs().max() < 1e-4


@pytest.mark.parametrize("partial_fp16", [False, True])
def test_written_partials(device, partial_fp16):
    """Known outputs and log2 sums, one -inf split with NaN beside it, one far below the others."""
    core = make_core(5, 2, 3, device, partial_fp16=partial_fp16)
    lengths = ints([5 * 128, 60, 3 * 128], device)
    plan = manual_plan(core, lengths, [5, 1, 3])
    memory = partials(core, device)
    g = torch.Generator().manual_seed(3)
    outs: dict[int, list] = {0: [], 2: []}
    for b, count in ((0, 5), (2, 3)):
        for split in range(count):
            o = torch.randn(10, 512, generator=g).half().float()
            lse = torch.randn(10, generator=g) * 4
            if split == 1:
                lse[:4] = -math.inf
            if split == 2:
                lse[5:] = -1e5
            slot = slot_of(core, plan, b, 0, split)
            memory.o[slot, :10] = o.to(memory.o.dtype).to(device)
            memory.o[slot, :10][lse.isneginf().to(device)] = math.nan
            memory.lse[slot, :10] = lse.to(device)
            outs[b].append((o.view(2, 5, 512), lse.view(2, 5)))
    out, lse = reduce(core, lengths, plan, memory.workspace, 2.0)
    for b, parts in outs.items():
        ref_out, ref_lse = merge(parts)
        off = (out[b].cpu().double() - 2 * ref_out).abs()
        # BF16, and FP32 sums of five terms that may cancel to near zero.
        assert (off <= (2 * ref_out).abs() * 2**-8 + 2**-18).all()
        assert (lse[b].cpu() - ref_lse).abs().max() < 1e-5
    assert (out[1] == 7).all()


def test_all_splits_empty(device):
    """Every split -inf, NaN outputs: out 0 and lse -inf."""
    core = make_core(3, 1, 1, device)
    lengths = ints([4 * 128], device)
    plan = manual_plan(core, lengths, 4)
    memory = partials(core, device)
    memory.lse.fill_(-math.inf)
    out, lse = reduce(core, lengths, plan, memory.workspace)
    assert (out == 0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("shift", [-3e4, -200.0, 0.0, 200.0, 3e4])
def test_large_log_sums(device, shift):
    """cutlass#2274: only differences of log sums are ever exponentiated."""
    core = make_core(2, 1, 1, device)
    lengths = ints([2 * 128], device)
    plan = manual_plan(core, lengths, 2)
    memory = partials(core, device)
    for split, (value, extra) in enumerate([(1.0, 1.0), (0.0, 3.0)]):
        slot = slot_of(core, plan, 0, 0, split)
        memory.o[slot, :2] = value
        memory.lse[slot, :2] = shift + extra
    out, lse = reduce(core, lengths, plan, memory.workspace)
    # Weights 2 and 8.
    assert (out.float() - 0.2).abs().max() <= 0.2 * 2**-8
    assert (lse - (shift + math.log2(10))).abs().max() <= max(abs(shift) * 2**-22, 1e-5)


@settings(max_examples=30)
@given(
    heads=st.integers(1, 128),
    q=st.integers(1, 8),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    output_scale=st.sampled_from([0.25, 1.0, 3.0]),
    seed=st.integers(0, 2**16),
)
def test_any_partials(device, heads, q, counts, output_scale, seed):
    """Random partials of every q tile against the float64 merge of kbmla.reference."""
    core = make_core(heads, q, len(counts), device, clusters=128)
    lengths = ints([c * 128 for c in counts], device)
    plan = manual_plan(core, lengths, counts)
    memory = partials(core, device)
    g = torch.Generator().manual_seed(seed)
    sizes = core.sizes
    expected: dict[int, tuple[list, list]] = {}
    for b, count in enumerate(counts):
        if count == 1:
            continue
        os, ls = [], []
        for split in range(count):
            o = torch.randn(sizes.rows, 512, generator=g)
            lse = torch.randn(sizes.rows, generator=g) * 10
            lse[torch.rand(sizes.rows, generator=g) < 0.2] = -math.inf
            for tile in range(sizes.num_q_tiles):
                first = tile * sizes.q_tile_rows
                last = min(first + sizes.q_tile_rows, sizes.rows)
                slot = slot_of(core, plan, b, tile, split)
                memory.o[slot, : last - first] = o[first:last].to(device)
                memory.lse[slot, : last - first] = lse[first:last].to(device)
            os.append(o)
            ls.append(lse)
        expected[b] = (os, ls)
    out, lse = reduce(core, lengths, plan, memory.workspace, output_scale)
    for b, (os, ls) in expected.items():
        ref_out, ref_lse = reference.merge(os, ls)
        got = out[b].reshape(sizes.rows, 512).cpu().double()
        empty = ref_lse.isneginf()
        off = (got - ref_out * output_scale).abs()
        assert (off <= (ref_out * output_scale).abs() * 2**-8 + 2**-16).all()
        got_lse = lse[b].reshape(sizes.rows).cpu().double()
        assert torch.equal(got_lse.isneginf(), empty)
        assert (got_lse - ref_lse)[~empty].abs().max().item() < 1e-4 if (~empty).any() else True


def test_merge_helper_states_its_base():
    """vllm#47079, sglang#33064: a helper that merges says which logarithm it takes."""
    assert "base-2" in (reference.merge.__doc__ or "")
    ones = torch.ones(1, 512)
    out, lse = reference.merge([ones, ones * 0], [torch.tensor([1.0]), torch.tensor([3.0])])
    assert torch.allclose(out, ones.double() * 0.2)
    assert abs(lse.item() - math.log2(10)) < 1e-12


def test_reads_and_writes_only_its_own(device):
    """Guard bytes around workspace, out and lse stay."""
    core = make_core(20, 3, 2, device)
    lengths = ints([600, 50], device)
    plan = manual_plan(core, lengths, [5, 1])
    workspace = torch.full_like(new_workspace(core, device), 0)
    out = torch.zeros(2, 3, 20, 512, dtype=torch.bfloat16, device=device)
    lse = torch.zeros(2, 3, 20, device=device)
    with guarded(workspace) as w, guarded(out, fill=NAN_BYTE) as o, guarded(lse) as s:
        ops.reduce(lengths, *plan, w, o, s, 1.0, 1000, core.config)
        assert (o[1] == 0).all()
        assert not o.isnan().any()


def test_reduce_of_an_empty_batch(device):
    core = make_core(4, 1, 2, device)
    plan = manual_plan(core, ints([], device), [])
    out, lse = reduce(core, ints([], device), plan, new_workspace(core, device))
    assert out.shape == (0, 1, 4, 512)
    assert lse.shape == (0, 1, 4)
