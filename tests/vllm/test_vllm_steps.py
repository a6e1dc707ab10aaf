# SPDX-License-Identifier: Apache-2.0
"""The builder and the implementation, driven with vLLM's own metadata on the CPU, against float64.

The caches are the suite's: NaN in every byte that no request owns, page ids in random order.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from cases import make_batch, random_query, random_rows, shard
from compare import NORM_BOUND, assert_bitwise, assert_empty_rows, assert_result, norm_error, truth
from engine_cpu import engine_config, make_builder, make_layer, step
from log_lines import log_lines
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

import kbmla.vllm
from kbmla.core import CAPACITY
from kbmla.vllm.backend import KbmlaBackend

kbmla.vllm.register()

SCALE = 192**-0.5
Q_SCALE, K_SCALE = 0.75, 1.5
LENGTHS = [1, 5, 63, 64, 65, 700, 4, 130, 2500, 8]
# V has no scale of its own in the cache; whoever used it would show.
LAYER_SCALES = SimpleNamespace(
    _q_scale_float=Q_SCALE,
    _k_scale_float=K_SCALE,
    _v_scale_float=float("nan"),
    _q_scale=torch.tensor(Q_SCALE),
    _k_scale=torch.tensor(K_SCALE),
    _v_scale=torch.tensor(float("nan")),
)
SCALES = (SCALE * Q_SCALE * K_SCALE, K_SCALE)


def drafts(number: int) -> dict:
    if not number:
        return {}
    settings = {"method": "ngram", "num_speculative_tokens": number, "prompt_lookup_max": 3}
    return {"speculative_config": settings}


class Engine:
    """A layer and its builder."""

    def __init__(self, folder, heads: int = 16, nope: int = 128, value: int = 128, **arguments):
        self.config = engine_config(folder, heads, nope, value, **arguments)
        scale = (nope + 64) ** -0.5
        self.layer = make_layer(self.config, KbmlaBackend, heads, folder, scale, nope, value)
        self.impl = self.layer.impl
        self.builder = make_builder(self.config, self.layer, KbmlaBackend)

    def run(self, batch, metadata, padding: int = 0):
        """(out, lse) of the step's decode tokens, [B, q, heads, ...]."""
        query = batch.query
        if padding:
            garbage = torch.full((padding, *query.shape[1:]), 0x7F, dtype=torch.uint8)
            query = torch.cat([query.view(torch.uint8), garbage]).view(query.dtype)
        out, lse = self.impl.forward_mqa(query.flatten(0, 1), batch.cache, metadata, LAYER_SCALES)
        assert out.dtype is torch.bfloat16
        assert out.shape == (query.shape[0] * query.shape[1], query.shape[2], 512)
        shape = query.shape[:2]
        return out.unflatten(0, shape), None if lse is None else lse.unflatten(0, shape)


def expected(batch):
    return truth(replace(batch, scales=SCALES))


def assert_out(out, batch) -> None:
    ref, ref_lse = expected(batch)
    assert_result(out, ref_lse, ref, ref_lse)


@pytest.mark.parametrize(
    ("heads", "q"),
    [
        *((heads, q) for heads in (12, 16, 20, 64, 128) for q in (1, 4)),
        *((16, q) for q in (2, 3, 5, 6, 7, 8)),
        *((heads, 1) for heads in (8, 96)),
    ],
)
def test_step(tmp_path, heads, q):
    engine = Engine(tmp_path, heads, **drafts(q - 1))
    batch = make_batch(LENGTHS, heads, q)
    metadata = engine.builder.build(0, step(batch))
    assert (metadata.num_decodes, metadata.num_prefills) == (len(LENGTHS), 0)
    assert metadata.decode.query_len == q
    out, lse = engine.run(batch, metadata)
    assert lse is None
    assert_out(out, batch)
    again, _ = engine.run(batch, engine.builder.build(0, step(batch)))
    assert_bitwise(again, out)


@pytest.mark.parametrize("q", [1, 2, 4])
def test_padded_requests(tmp_path, q):
    """Full graphs pad with requests of length 0 whose rows of q hold anything."""
    engine = Engine(tmp_path, **drafts(q - 1))
    batch, padding = make_batch(LENGTHS, 16, q), 6
    metadata = engine.builder.build_for_cudagraph_capture(step(batch, padding))
    assert metadata.num_decodes == len(LENGTHS) + padding
    out, _ = engine.run(batch, metadata, padding)
    assert_out(out[: len(LENGTHS)], batch)
    empty = torch.ones(padding, q, 16, dtype=torch.bool)
    tail = out[len(LENGTHS) :]
    assert_empty_rows(tail, torch.full(tail.shape[:-1], -torch.inf), empty)


@pytest.mark.parametrize("q", [1, 2, 4])
def test_more_padded_requests_than_padded_tokens(tmp_path, q):
    """The second model runner pads pieces of a graph to one request per token, so the tokens are
    not q times the requests: q is that of the requests that are there."""
    engine = Engine(tmp_path, **drafts(q - 1))
    batch, padding = make_batch(LENGTHS, 16, q), 6
    requests = (len(LENGTHS) + padding) * q
    padded = replace(
        step(batch, requests - len(LENGTHS)), num_actual_tokens=requests, max_query_len=q
    )
    metadata = engine.builder.build(0, padded)
    assert metadata.num_decodes == requests
    assert metadata.decode.query_len == q
    out, _ = engine.run(batch, metadata, padding)
    assert_out(out[: len(LENGTHS)], batch)
    assert not out[len(LENGTHS) :].any()


def test_prefill_beside_decode(tmp_path):
    engine = Engine(tmp_path)
    batch = make_batch(LENGTHS, 16, 1)
    metadata = engine.builder.build(0, step(batch, prefill=(300, 300)))
    assert (metadata.num_decodes, metadata.num_prefills) == (len(LENGTHS), 1)
    assert metadata.num_decode_tokens == len(LENGTHS)
    out, _ = engine.run(batch, metadata)
    assert_out(out, batch)


def test_shorter_verification_is_prefill(tmp_path):
    """Query tokens are uniform: a request without drafts is left to prefill."""
    engine = Engine(tmp_path, **drafts(3))
    batch = make_batch(LENGTHS, 16, 4)
    metadata = engine.builder.build(0, step(batch, prefill=(1, 1)))
    assert (metadata.num_decodes, metadata.num_prefills) == (len(LENGTHS), 1)
    assert metadata.decode.query_len == 4
    out, _ = engine.run(batch, metadata)
    assert_out(out, batch)


def test_prefill_alone(tmp_path):
    engine = Engine(tmp_path)
    try:
        metadata = engine.builder.build(0, step(make_batch([], 16, 1), prefill=(300, 300)))
    except RuntimeError as error:
        if "pin" not in str(error):
            raise
        pytest.skip("this release pins host memory for a prefill, which takes a GPU")
    assert metadata.decode is None


def test_plan_follows_the_lengths(tmp_path):
    """One plan per step, at fixed addresses, shared by the layers and made anew by the next."""
    engine = Engine(tmp_path)
    first, second = make_batch([4000, 10, 10], 16, 1), make_batch([10, 10, 4000], 16, 1)
    metadata = engine.builder.build(0, step(first))
    counts, work = engine.builder.mla.plans[engine.builder.mla.key(1, 3)]
    address, before = work.data_ptr(), counts[:3].tolist()
    out, _ = engine.run(first, metadata)
    assert_out(out, first)
    metadata = engine.builder.build(0, step(second))
    assert metadata.decode.mla is engine.builder.mla
    _, work = engine.builder.mla.plans[engine.builder.mla.key(1, 3)]
    assert work.data_ptr() == address
    assert counts[:3].tolist() == before[::-1]
    out, _ = engine.run(second, metadata)
    assert_out(out, second)


def test_strided_cache(tmp_path):
    """Cross-layer layouts: a page of this layer, then the pages of others."""
    engine = Engine(tmp_path)
    batch = make_batch(LENGTHS, 16, 1)
    pages, page, row = batch.cache.shape
    layers = torch.full((pages, 3, page, row), 0x7F, dtype=torch.uint8)
    layers[:, 1] = batch.cache.view(torch.uint8)
    spread = replace(batch, cache=layers.view(batch.cache.dtype)[:, 1])
    assert not spread.cache.is_contiguous()
    out, _ = engine.run(spread, engine.builder.build(0, step(spread)))
    assert_out(out, batch)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (2, 64), (4, 16), (8, 1)])
@pytest.mark.parametrize("q", [1, 4])
def test_context_parallel(tmp_path, world, interleave, q):
    """Each rank's builder and layer on its shard, merged by vLLM's own rule, against one device."""
    try:
        from vllm.v1.attention.ops.dcp import _lse_weighted_combine
    except ImportError:
        from vllm.v1.attention.ops.dcp_alltoall import _lse_weighted_combine

    engine = Engine(tmp_path, 32, **drafts(q - 1))
    engine.builder.dcp_world_size = engine.impl.dcp_world_size = world
    engine.config.parallel_config.cp_kv_cache_interleave_size = interleave
    totals = [1, 3, 63, 64, 65, 700, 1030]
    rows, query = random_rows(totals), random_query(len(totals), q, 32)
    whole = make_batch(totals, 32, q, rows=rows, query=query, scales=SCALES)
    outs, lses = [], []
    for rank in range(world):
        engine.impl.dcp_rank = rank
        mine = [shard(one, world, rank, interleave) for one in rows]
        lengths = [one.shape[0] for one in mine]
        assert (
            lengths
            == get_dcp_local_seq_lens(torch.tensor(totals), world, rank, interleave).tolist()
        )
        batch = make_batch(
            lengths, 32, q, rows=mine, query=query, scales=SCALES, totals=totals,
            cp=(world, rank, interleave),
        )  # fmt: skip
        out, lse = engine.run(batch, engine.builder.build(0, step(batch)))
        assert_result(out, lse, *truth(batch))
        outs.append(out.flatten(0, 1))
        lses.append(lse.flatten(0, 1))
    assert engine.impl.lse_base_on_e is False
    merged = _lse_weighted_combine(
        torch.stack(outs).float(), torch.stack(lses), is_lse_base_on_e=engine.impl.lse_base_on_e
    )
    ref, ref_lse = truth(whole)
    seen = ~ref_lse.isneginf()
    merged = merged.unflatten(0, ref.shape[:2])
    assert merged.isfinite().all()
    # Each rank rounds to BF16 before the merge, 2^-9 of a value: inside the margin of the bound.
    assert norm_error(merged[seen], ref[seen]) <= NORM_BOUND


def test_prepared_before_the_first_step(tmp_path):
    """Everything a step needs is made with the layer; the builder takes it over."""
    engine = Engine(tmp_path, 16, max_num_seqs=300, **drafts(3))
    mla = engine.builder.mla
    assert [mla] == engine.impl.buffers.mlas
    classes = {capacity for most, capacity in CAPACITY[False] if most <= 1024}
    assert mla.cores.keys() == {(q, capacity) for q in (1, 2, 3, 4) for capacity in classes}
    assert max(core.max_requests for core in mla.cores.values()) == 300
    assert all(core.config.partial_fp16 for core in mla.cores.values())
    before = {key: [t.data_ptr() for t in plan] for key, plan in mla.plans.items()}
    workspace = mla.workspace.data_ptr()
    for requests in (1, 17, 65, 300):
        for q in (1, 2, 3, 4):
            batch = make_batch([q] * requests, 16, q)
            engine.builder.build(0, step(batch))
    assert before == {key: [t.data_ptr() for t in plan] for key, plan in mla.plans.items()}
    assert workspace == mla.workspace.data_ptr()


def test_one_owner_at_a_time(tmp_path):
    """A second builder of a shape gets its own plans; a builder that is gone frees its own."""
    engine = Engine(tmp_path)
    second = make_builder(engine.config, engine.layer, KbmlaBackend)
    assert second.mla is not engine.builder.mla
    assert second.mla.cores.keys() == engine.builder.mla.cores.keys()
    engine.builder = None
    gc.collect()
    third = make_builder(engine.config, engine.layer, KbmlaBackend)
    assert [third.mla] == engine.impl.buffers.mlas


def test_every_builder_finds_its_own_prepared(tmp_path, monkeypatch):
    """One for each micro-batch, made with the layer, where vLLM's memory profile counts it."""
    from vllm.config import ParallelConfig

    monkeypatch.setattr(ParallelConfig, "num_ubatches", property(lambda self: 2))
    engine = Engine(tmp_path)
    second = make_builder(engine.config, engine.layer, KbmlaBackend)
    assert [engine.builder.mla, second.mla] == engine.impl.buffers.mlas
    third = make_builder(engine.config, engine.layer, KbmlaBackend)
    assert third.mla not in engine.impl.buffers.mlas


@pytest.mark.parametrize(
    ("method", "use_mla", "ubatches", "expected"),
    [
        (None, False, 1, 1),
        ("ngram", True, 0, 1),
        ("mtp", True, 1, 2),
        ("eagle", False, 1, 1),
        ("draft_model", True, 2, 4),
    ],
)
def test_number_of_builders(method, use_mla, ubatches, expected):
    from kbmla.vllm.backend import _builders

    speculative = method and SimpleNamespace(
        method=method,
        use_eagle=lambda: method in ("eagle", "mtp"),
        draft_model_config=SimpleNamespace(use_mla=use_mla),
    )
    parallel = SimpleNamespace(num_ubatches=ubatches)
    config = SimpleNamespace(speculative_config=speculative, parallel_config=parallel)
    assert _builders(config) == expected


def test_layers_share_and_engines_do_not_leak(tmp_path):
    from kbmla.vllm import buffers

    engine = Engine(tmp_path)
    one = engine.impl.buffers
    arguments = (16, one.device, False, 1, 32, 1)
    assert buffers.shared(*arguments) is one
    del engine, one
    gc.collect()
    assert not buffers._shared


@pytest.mark.parametrize("starts", [[0, 2, 4, 5], [0, 2, 3, 4], [0, 1, 3, 3]])
def test_uneven_step_is_refused(tmp_path, starts):
    engine = Engine(tmp_path)
    with pytest.raises(
        RuntimeError,
        match=r"query tokens for each of up to 3 requests, got . in all and query_start_loc \[0, ",
    ):
        engine.builder._build_decode(
            block_table_tensor=torch.zeros(3, 4, dtype=torch.int32),
            seq_lens_device=torch.ones(3, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            num_decode_tokens=starts[-1],
            dcp_tot_seq_lens_device=None,
        )


def test_query_parts_are_refused(tmp_path):
    engine = Engine(tmp_path)
    with pytest.raises(TypeError, match="q: expected one quantised"):
        engine.impl.forward_mqa((torch.zeros(1), torch.zeros(1)), None, None, LAYER_SCALES)


@pytest.mark.parametrize(("capability", "said"), [((8, 0), 1), ((9, 0), 0), ((10, 0), 1)])
def test_log_of_the_portable_kernel(monkeypatch, capability, said):
    from kbmla.vllm import backend

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with log_lines() as lines:
        for _ in range(2):
            backend._say_which_kernel(torch.device("cuda", 0))
    assert sum("the portable CUDA kernel serves" in line for line in lines) == said


def test_what_vllm_reads_off_the_classes():
    builder, impl = KbmlaBackend.get_builder_cls(), KbmlaBackend.get_impl_cls()
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    assert impl.can_return_lse_for_decode
    assert impl.supports_dcp
    assert impl.supports_mtp_with_cp_non_trivial_interleave_size
    assert not impl.supports_pcp
    assert KbmlaBackend.is_mla()
    assert not KbmlaBackend.is_sparse()
    if hasattr(KbmlaBackend, "indexes_kv_by_block_stride"):
        assert KbmlaBackend.indexes_kv_by_block_stride()


@pytest.mark.parametrize(
    ("heads", "nope", "value"), [(16, 128, 128), (20, 192, 256)], ids=["deepseek", "glm"]
)
def test_whole_layer(tmp_path, heads, nope, value):
    """vLLM's layer from q to output: absorption, FP8 query, our decode, up-projection."""
    engine = Engine(tmp_path, heads, nope, value)
    layer = engine.layer
    with torch.no_grad():
        layer.kv_b_proj.weight.normal_(std=512**-0.5)
    layer.process_weights_after_loading(torch.bfloat16)
    batch = make_batch(LENGTHS, heads, 1)
    metadata = engine.builder.build(0, step(batch))
    q = torch.randn(len(LENGTHS), heads, nope + 64, dtype=torch.bfloat16)
    output = torch.full((len(LENGTHS), heads * value), torch.nan, dtype=torch.bfloat16)
    nothing = torch.zeros(len(LENGTHS), 512, dtype=torch.bfloat16)
    layer.forward_impl(
        q, nothing, nothing[:, None, :64], batch.cache.view(torch.uint8), metadata, output=output
    )
    w = layer.kv_b_proj.weight.detach().double().view(heads, nope + value, 512)
    latent = torch.einsum("thn,hnl->thl", q[..., :nope].double(), w[:, :nope])
    query = torch.cat([latent, q[..., nope:].double()], -1).to(torch.bfloat16)
    absorbed = replace(
        batch,
        query=query.float().to(batch.query.dtype)[:, None],
        scales=((nope + 64) ** -0.5, 1.0),
    )
    ref, _ = truth(absorbed)
    ref = torch.einsum("thl,hvl->thv", ref[:, 0].double(), w[:, nope:]).flatten(1)
    assert output.isfinite().all()
    # A projection of out errs by as much in the norm; the layer's BF16 is inside the margin.
    assert norm_error(output, ref) <= NORM_BOUND
