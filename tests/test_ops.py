# SPDX-License-Identifier: Apache-2.0
"""The registered ops: schemas, opcheck, torch.compile, and on CUDA graphs and streams."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from cases import auto_plan, core_for, make_batch, manual_plan, new_out, new_workspace
from compare import NORM_BOUND, assert_same, truth

from kbmla import BalancedMla

VERBS = ("plan", "decode", "reduce")
# What each op writes.
WRITTEN = {
    "plan": {"counts", "work"},
    "decode": {"workspace", "out", "lse"},
    "reduce": {"out", "lse"},
}


@pytest.mark.parametrize("verb", VERBS)
def test_schema(verb):
    """SageAttention#107, pytorch#189523: what is written is declared, and nothing is returned, so
    no result can alias an argument."""
    schema = getattr(torch.ops.kbmla, verb).default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == WRITTEN[verb]
    assert len(schema.returns) == 0
    sets = [name for a in schema.arguments if a.alias_info for name in a.alias_info.before_set]
    assert len(sets) == len(set(sets)), "two arguments declare the same alias set"


def op_arguments(device) -> dict[str, tuple]:
    batch = make_batch([700, 3, 0], 12, 2, device=device, seed=1)
    core = core_for(batch)
    counts, work = manual_plan(core, batch.lengths, [4, 1, 1])
    workspace = torch.zeros_like(new_workspace(core, device))
    # opcheck compares results; NaN never equals itself.
    out, lse = (torch.zeros_like(t) for t in new_out(batch))
    config = list(core.config)
    return {
        "plan": (batch.lengths, torch.zeros_like(counts), torch.zeros_like(work), config),
        "decode": (
            batch.query, batch.cache, batch.block_table, batch.lengths, None, counts, work,
            workspace, out, lse, *batch.scales, 1, 0, 1, True, config,
        ),
        "reduce": (batch.lengths, counts, work, workspace, out, lse, 1.0, 1000, config),
    }  # fmt: skip


@pytest.fixture
def allclose_of_e4m3(monkeypatch):
    """torch.allclose, with which opcheck looks for mutated inputs, does not know E4M3: bytes do."""
    original = torch.allclose

    def allclose(a, b, *args, **kwargs):
        if a.dtype == torch.float8_e4m3fn:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return original(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "allclose", allclose)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.usefixtures("allclose_of_e4m3")
def test_opcheck(device, verb):
    """SageAttention#107: schema, fake kernel and dispatch agree with what the op does."""
    op = getattr(torch.ops.kbmla, verb).default
    arguments = op_arguments(device)[verb]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor",
              "test_aot_dispatch_dynamic")  # fmt: skip
    assert set(torch.library.opcheck(op, arguments, test_utils=checks).values()) == {"SUCCESS"}


@pytest.mark.usefixtures("allclose_of_e4m3")
def test_opcheck_without_lse(device):
    arguments = list(op_arguments(device)["decode"])
    arguments[9] = None
    torch.library.opcheck(torch.ops.kbmla.decode.default, tuple(arguments))


def compiled_step(backend: str, device):
    batch = make_batch([3000, 100, 64], 16, 2, device=device, seed=2)
    core = core_for(batch)
    config = list(core.config)
    plan, workspace = auto_plan(core, batch.lengths), new_workspace(core, device)

    def step(query, lengths, counts, work, scratch, out, lse):
        torch.ops.kbmla.plan(lengths, counts, work, config)
        torch.ops.kbmla.decode(
            query, batch.cache, batch.block_table, lengths, None, counts, work, scratch, out, lse,
            *batch.scales, 1, 0, 1, True, config,
        )  # fmt: skip
        return out.float() * 2 + lse.unsqueeze(-1)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for lengths in ([3000, 100, 64], [257, 0, 64], [1, 99, 2]):
        on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
        results = []
        for run in (step, compiled):
            out, lse = new_out(batch)
            value = run(
                batch.query,
                on_device,
                *(t.clone() for t in plan),
                torch.full_like(workspace, 0x7F),
                out,
                lse,
            )
            results.append((out, lse, value))
        for eager, ours in zip(*results, strict=True):
            assert torch.equal(eager, ours)
        batch.lengths = on_device
        ref_out, _ = truth(batch)
        error = (results[1][0].cpu().double() - ref_out).norm() / ref_out.norm()
        assert error <= NORM_BOUND


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_step(device, backend):
    """SageAttention#107, pytorch#189523: a fullgraph step equals eager with changed lengths."""
    compiled_step(backend, device)


@pytest.mark.slow
def test_compiled_step_inductor(device):
    """The same through inductor, which decides on its own what may be reused or reordered."""
    if device.type == "cpu" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++ for CPU code")
    compiled_step("inductor", device)


def test_wrappers_compile_without_a_break(device):
    """The class, not only the raw ops, goes through fullgraph."""
    batch = make_batch([300, 20], 8, 1, device=device, seed=3)
    m = BalancedMla(8, device, False)
    m.require(1, 2)
    out, lse = new_out(batch)

    def step(lengths, out, lse):
        m.plan(1, lengths)
        m.decode(batch.query, batch.cache, batch.block_table, lengths, batch.scales, out, lse)

    step(batch.lengths, out, lse)
    base = out.clone(), lse.clone()
    out.fill_(math.nan)
    torch.compile(step, backend="aot_eager", fullgraph=True)(batch.lengths, out, lse)
    assert_same((out, lse), base)


def test_inference_mode(device):
    batch = make_batch([300, 20], 8, 1, device=device, seed=4)
    m = BalancedMla(8, device, False)
    with torch.inference_mode():
        m.require(1, 2)
        out, lse = new_out(batch)
        m.plan(1, batch.lengths)
        m.decode(batch.query, batch.cache, batch.block_table, batch.lengths, batch.scales, out, lse)
    assert not out.isnan().any()


def test_ops_are_on_every_device_of_this_build(device):
    for verb in VERBS:
        key = "CUDA" if device.type == "cuda" else "CPU"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"kbmla::{verb}", key)


# ---------------------------------------------------------------------------- CUDA


@pytest.mark.gpu
def test_current_stream(cuda):
    """SageAttention#371, #380: work runs on the tensors' current stream. A query written by that
    stream behind 50 ms of other work is the one that is read."""
    batch = make_batch([3000, 64], 16, 1, device=cuda, seed=5)
    m = BalancedMla(16, cuda, False)
    m.require(1, 2)
    real = batch.query.clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            batch.query.view(torch.uint8).fill_(0x7F)
            torch.cuda._sleep(100_000_000)
            batch.query.view(torch.uint8).copy_(real.view(torch.uint8))
            out, lse = new_out(batch)
            m.plan(1, batch.lengths)
            args = (batch.query, batch.cache, batch.block_table, batch.lengths, batch.scales)
            m.decode(*args, out, lse)
            side.synchronize()
            assert not out.isnan().any()
            assert not lse.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("side_stream", [False, True])
def test_graph_follows_its_inputs(cuda, side_stream):
    """SageAttention#371, vllm#33638: capture, change query, cache and lengths in place, replay."""
    batch = make_batch([900, 64, 0], 16, 2, device=cuda, seed=6)
    other = make_batch([257, 1, 300], 16, 2, device=cuda, seed=7, columns=17)
    m = BalancedMla(16, cuda, False)
    m.require(2, 3)
    pages = max(batch.cache.shape[0], other.cache.shape[0])
    cache = torch.zeros(pages, 64, 576, dtype=torch.uint8, device=cuda)
    table = torch.zeros(3, 17, dtype=torch.int32, device=cuda)
    query, lengths = batch.query.clone(), batch.lengths.clone()
    out, lse = new_out(batch)

    def load(b) -> None:
        cache[: b.cache.shape[0]] = b.cache.view(torch.uint8)
        table[:, : b.block_table.shape[1]] = b.block_table
        query.view(torch.uint8).copy_(b.query.view(torch.uint8))
        lengths.copy_(b.lengths)

    def step() -> None:
        m.plan(2, lengths)
        m.decode(query, cache.view(torch.float8_e4m3fn), table, lengths, batch.scales, out, lse)

    load(batch)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream() if side_stream else None
    with torch.cuda.graph(graph, stream=stream):
        step()
    for b in (other, batch, other):
        load(b)
        step()
        torch.cuda.synchronize()
        eager = out.clone(), lse.clone()
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same((out, lse), eager)
