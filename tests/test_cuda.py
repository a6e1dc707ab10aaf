# SPDX-License-Identifier: Apache-2.0
"""What only the CUDA backend has: agreement with the CPU, repeatability on many blocks,
programmatic dependent launch, and the short selection that runs under compute-sanitizer."""

from __future__ import annotations

import random

import pytest
import torch
from cases import (
    Batch,
    auto_plan,
    core_for,
    decode,
    has_fp22_scores,
    make_batch,
    make_core,
    new_out,
    new_workspace,
)
from compare import NORM_BOUND, assert_result, assert_same, bits, norm_error, truth

from kbmla import BalancedMla

pytestmark = pytest.mark.gpu


def on(batch: Batch, device: torch.device | str) -> Batch:
    moved = make_batch([0] * batch.shape[0], batch.shape[2], batch.shape[1], device="cpu")
    moved.query, moved.cache = batch.query.to(device), batch.cache.to(device)
    moved.block_table, moved.lengths = batch.block_table.to(device), batch.lengths.to(device)
    moved.rows, moved.scales, moved.cp = batch.rows, batch.scales, batch.cp
    moved.totals = None if batch.totals is None else batch.totals.to(device)
    return moved


@pytest.mark.parametrize("seed", range(60))
def test_random_configurations(cuda, seed):
    """Any shape under any plan, against float64, with everything unused poisoned."""
    rng = random.Random(seed)
    heads = rng.choice([1, 7, 12, 16, 20, 33, 64, 96, 128])
    q = rng.choice([n for n in range(1, 9) if heads * n <= 1024])
    lengths = [
        rng.choice([0, 1, 63, 64, 65, 127, 128, 129, 700, 2500, 9000])
        for _ in range(rng.choice([1, 2, 5, 9]))
    ]
    page = rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 256])
    batch = make_batch(lengths, heads, q, device=cuda, page=page, seed=seed)
    options = {
        "clusters": rng.choice([None, 1, 7, 132]),
        "partial_fp16": rng.random() < 0.3,
        "p_scale": rng.choice([1.0, 16.0, 256.0]),
        "reducer_d_tiles": rng.choice([1, 2]),
    }
    assert_result(*decode(core_for(batch, **options), batch), *truth(batch))


@pytest.mark.parametrize("heads", [12, 64, 128])
def test_equal_to_the_cpu(cuda, heads):
    """The same plan on both. Another backend may look at the maximum after other numbers of keys,
    so P is rounded against another maximum: each errs by at most NORM_BOUND, independently. Where
    scores are FP22, what that moves an lse by is taken off first."""
    batch = make_batch([5000, 0, 64, 900], heads, 2, device="cpu", seed=heads)
    core = core_for(batch, p_scale=256.0)
    plan = auto_plan(core, batch.lengths)
    out, lse = decode(core, batch, plan)
    moved = on(batch, cuda)
    got, got_lse = decode(
        core_for(moved, p_scale=256.0), moved, (plan[0].to(cuda), plan[1].to(cuda))
    )
    assert norm_error(got, out.double()) < 2**0.5 * NORM_BOUND
    finite = ~torch.isneginf(lse)
    assert torch.equal(torch.isneginf(got_lse.cpu()), ~finite)
    if has_fp22_scores(cuda):
        lse = lse + (truth(moved, fp22=True, on=cuda)[1] - truth(moved, on=cuda)[1]).cpu()
    # FP32 sums in another order, exp2 to 2 ulp: see PROBE_LSE.
    assert (got_lse.cpu() - lse)[finite].abs().max() < 1e-4


@pytest.mark.parametrize(("heads", "q"), [(12, 1), (128, 2)])
def test_a_hundred_repeats(cuda, heads, q):
    """Bitwise the same, whatever the order in which blocks and warps run."""
    batch = make_batch([30000, 500, 0, 7000], heads, q, device=cuda, seed=9)
    core = core_for(batch, clusters=None)
    first = decode(core, batch)
    for _ in range(100):
        assert_same(decode(core, batch), first)


def test_one_graph_for_all_lengths(cuda):
    """Captured once at length 1, replayed over 200 steps of growing, shrinking, emptied and
    permuted lengths: each equal to eager, in the same buffers, with nothing allocated."""
    rng = random.Random(4)
    batch = make_batch([6000, 3000, 500, 64, 1, 2000], 16, 2, device=cuda, seed=11)
    most = batch.lengths.tolist()
    lengths = torch.ones_like(batch.lengths)
    m, eager = (BalancedMla(16, cuda, False) for _ in range(2))
    out, lse = new_out(batch)

    def step(mla: BalancedMla, written: tuple[torch.Tensor, torch.Tensor]) -> None:
        tensors = (batch.query, batch.cache, batch.block_table, lengths, batch.scales)
        mla.plan(2, lengths)
        mla.decode(*tensors, *written)

    for mla in (m, eager):
        mla.require(2, 6)
        step(mla, (out, lse))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(m, (out, lse))
    wanted = new_out(batch)
    now = [1] * 6
    for i in range(200):
        if i % 4 == 0:
            now = [min(n + rng.choice([1, 63, 700]), top) for n, top in zip(now, most, strict=True)]
        elif i % 4 == 1:
            now = [rng.randint(0, n) for n in now]
        elif i % 4 == 2:
            now[rng.randrange(6)] = 0
        else:
            now = [rng.randint(1, top) for top in most]
            order = rng.sample(range(6), 6)
            batch.block_table.copy_(batch.block_table[order].clone())
            most = [most[j] for j in order]
            now = [now[j] for j in order]
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        for tensor in (out, lse, *wanted):
            tensor.fill_(float("nan"))
        before = torch.cuda.memory_stats(cuda)["allocation.all.allocated"]
        graph.replay()
        step(eager, wanted)
        after = torch.cuda.memory_stats(cuda)["allocation.all.allocated"]
        assert after == before, f"step {i} allocated"
        assert_same((out, lse), wanted, f"step {i}, lengths {now}")


# Lets its dependents start at once, then writes late: each kernel that follows must wait itself.
LATE_COPY = r"""
extern "C" __global__ void late_copy(const int4 *from, int4 *to, long long count, int clocks) {
    asm volatile("griddepcontrol.launch_dependents;");
    long long start = clock64();
    while (clock64() - start < clocks) {
    }
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        to[i] = from[i];
}
"""


def arena_of(batch: Batch) -> torch.Tensor:
    """Lengths, table, query and cache in one buffer, in parts of 16 bytes."""
    parts = [batch.lengths, batch.block_table, batch.query, batch.cache]
    flat = [part.contiguous().view(torch.uint8).flatten() for part in parts]
    return torch.cat([torch.nn.functional.pad(part, (0, -part.numel() % 16)) for part in flat])


@pytest.mark.parametrize(
    ("page", "requests", "steps"), [(64, 3, 1000), (8, 3, 300), (64, 40, 300)], ids=str
)
def test_dependent_launch_waits_for_its_inputs(cuda, page, requests, steps):
    """1,000 steps behind a producer that triggers early, sleeps, then writes all inputs of plan and
    decode: bitwise equal to the same step without programmatic dependent launch. Others with pages
    that are copied row by row, and with more requests than a warp has lanes."""
    if torch.cuda.get_device_capability(cuda) < (9, 0):
        pytest.skip("programmatic dependent launch needs SM90")
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("this torch cannot compile a CUDA kernel at run time")
    late_copy = torch.cuda._compile_kernel(LATE_COPY, "late_copy")
    batches = [
        make_batch(
            [*lengths, *range(1, 100 * (requests - 3), 100)],
            16,
            1,
            page=page,
            device=cuda,
            seed=seed,
            columns=70 * 64 // page,
        )
        for seed, lengths in enumerate([[4000, 64, 0], [1, 2000, 300], [900, 900, 900]])
    ]
    pages = max(batch.cache.shape[0] for batch in batches)
    for batch in batches:
        cache = torch.full((pages, page, 576), 0x7F, dtype=torch.uint8, device=cuda)
        cache[: batch.cache.shape[0]] = batch.cache.view(torch.uint8)
        batch.cache = cache.view(torch.float8_e4m3fn)
    arenas = [arena_of(batch) for batch in batches]
    live = torch.zeros_like(arenas[0])
    views, first = [], 0
    for like in (batch.lengths, batch.block_table, batch.query, batch.cache):
        size = like.numel() * like.element_size()
        views.append(live[first : first + size].view(like.dtype).view(like.shape))
        first += size + -size % 16
    lengths, table, query, cache = views

    core = make_core(16, 1, requests, cuda, clusters=None)
    counts, work = auto_plan(core, batches[0].lengths)
    workspace = new_workspace(core, cuda)
    scales = batch.scales

    def step(pdl: bool, out: torch.Tensor, lse: torch.Tensor) -> None:
        core.plan(lengths, counts, work)
        core.decode(
            query,
            cache,
            table,
            lengths,
            *scales,
            counts,
            work,
            workspace,
            lse=lse,
            out=out,
            pdl=pdl,
        )

    wanted = []
    for arena in arenas:
        live.copy_(arena)
        torch.cuda.synchronize()
        results = new_out(batches[0])
        step(False, *results)
        torch.cuda.synchronize()
        wanted.append(results)

    wrong = torch.zeros((), dtype=torch.int64, device=cuda)
    for i in range(steps):
        which = i % len(arenas)
        out, lse = new_out(batches[0])
        # Up to 0.3 ms late, so that the host has launched everything behind it long before.
        late = 250_000 * (i % 3)
        late_copy((64, 1, 1), (256, 1, 1), (arenas[which], live, live.numel() // 16, late))
        step(True, out, lse)
        wrong += (out.view(torch.int16) != wanted[which][0].view(torch.int16)).sum()
        wrong += (lse.view(torch.int32) != wanted[which][1].view(torch.int32)).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("name", ["query", "cache", "out"])
def test_unaligned_rows_are_refused(cuda, name):
    """The kernels move 16 bytes at a time: rows that start between are refused, not misread."""
    batch = make_batch([200, 64], 16, 1, device=cuda, seed=3)
    core = core_for(batch)
    plan = auto_plan(core, batch.lengths)
    out, lse = new_out(batch, 7.0)
    tensors = {"query": batch.query, "cache": batch.cache, "out": out}
    plain = tensors[name]
    wide = torch.zeros((*plain.shape[:-1], plain.shape[-1] + 1), dtype=torch.uint8, device=cuda)
    wide = wide.view(plain.dtype) if plain.element_size() == 1 else wide.to(plain.dtype)
    tensors[name] = wide[..., :-1]
    with pytest.raises(ValueError, match=f"{name}: expected .* on a GPU"):
        core.decode(
            tensors["query"], tensors["cache"], batch.block_table, batch.lengths, *batch.scales,
            *plan, new_workspace(core, cuda), lse=lse, out=tensors["out"],
        )  # fmt: skip
    torch.cuda.synchronize()
    assert (lse == 7).all()


SANITIZED = [
    # heads, q, page, lengths, options
    (12, 1, 64, [700, 0, 129], {}),
    (20, 3, 1, [70, 3], {"partial_fp16": True}),
    (20, 2, 64, [200, 65], {"p_scale": 256.0}),
    (56, 1, 64, [300, 2], {}),
    (64, 1, 256, [900], {"reducer_d_tiles": 2}),
    (96, 5, 16, [300, 1], {"p_scale": 1.0}),
]


@pytest.mark.sanitize
@pytest.mark.parametrize(("heads", "q", "page", "lengths", "options"), SANITIZED)
def test_under_the_sanitizer(cuda, heads, q, page, lengths, options):
    """Small steps through every kernel: split and whole, NaN around, buffers as small as said."""
    batch = make_batch(lengths, heads, q, device=cuda, page=page, seed=heads)
    core = core_for(batch, clusters=8, **options)
    assert_result(*decode(core, batch), *truth(batch))


@pytest.mark.sanitize
def test_ranks_under_the_sanitizer(cuda):
    batch = make_batch([200, 0], 16, 2, device=cuda, totals=[401, 1], cp=(2, 1, 16))
    got = decode(core_for(batch, clusters=8), batch)
    assert_result(*got, *truth(batch))
    assert (bits(got[0][1]) == 0).all()
