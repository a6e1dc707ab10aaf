# SPDX-License-Identifier: Apache-2.0
"""vLLM's own configuration, layer, metadata and builder on a machine without a GPU.

Nothing of vLLM is imitated. Its CPU platform is chosen by hand, since a wheel for CUDA does not
find one here; one prefill class stands in for kernels that decode never calls.
"""

# ruff: noqa: E402  (vLLM's modules keep the platform that they see when they are imported)

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_DO_NOT_TRACK="1")

import torch
import vllm.platforms
from cases import Batch
from tiny_model import write_model
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()

import vllm.utils.torch_utils

# Found out before the platform was chosen: without an accelerator there is no pinned memory.
vllm.utils.torch_utils.PIN_MEMORY = False

import vllm.model_executor.layers.attention.mla_attention as mla_attention
import vllm.model_executor.models.registry as model_registry
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment
from vllm.distributed.parallel_state import ensure_model_parallel_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

# A child process would look for a platform of its own.
model_registry._run_in_subprocess = lambda function: function()

LAYER = "model.layers.0.self_attn.attn"


class NoPrefill(MLAPrefillBackend):
    """Stands where the prefill kernels are."""

    def __init__(self, **_: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "NONE"

    def clone(self) -> NoPrefill:
        return self

    def prepare_metadata(self, metadata: Any) -> None:
        pass

    def run_prefill_context_chunk(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("decode alone is run here")

    run_prefill_new_tokens = run_prefill_context_chunk


mla_attention.get_mla_prefill_backend = lambda config: NoPrefill


def cuda_platform() -> Any:
    """vLLM's CUDA platform class, for its choice of a backend; a driver would load its kernels."""
    sys.modules.setdefault("vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms.cuda import CudaPlatformBase

    return CudaPlatformBase


def engine_config(
    folder: Path, heads: int = 16, nope: int = 128, value: int = 128, **arguments: Any
) -> Any:
    """The engine's configuration for a tiny model of these dimensions, as vLLM makes it."""
    path = folder / f"model{heads}-{nope}-{value}"
    if not path.exists():
        write_model(path, heads, layers=1, nope=nope, value=value)
    given = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
        "block_size": 64,
        "max_model_len": 16384,
        "max_num_seqs": 32,
        "enforce_eager": True,
        **arguments,
    }
    return EngineArgs(model=str(path), skip_tokenizer_init=True, **given).create_engine_config()


def make_layer(
    config: Any,
    backend: Any,
    heads: int,
    folder: Path,
    scale: float,
    nope: int = 128,
    value: int = 128,
) -> Any:
    """vLLM's MLA layer of `heads` heads with `backend`, its parallel groups of one process made."""
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        try:
            up = ColumnParallelLinear(512, heads * (nope + value), bias=False)
            return mla_attention.MLAAttention(
                num_heads=heads,
                scale=scale,
                qk_nope_head_dim=nope,
                qk_rope_head_dim=64,
                v_head_dim=value,
                q_lora_rank=None,
                kv_lora_rank=512,
                kv_b_proj=up,
                cache_config=config.cache_config,
                quant_config=None,
                prefix=LAYER,
                attn_backend=backend,
            )
        finally:
            torch.set_default_dtype(torch.float32)


def make_builder(config: Any, layer: Any, backend: Any) -> Any:
    """The metadata builder of the layer's KV-cache group."""
    with set_current_vllm_config(config):
        return backend.get_builder_cls()(
            layer.get_kv_cache_spec(config), [LAYER], config, torch.device("cpu")
        )


def step(batch: Batch, padding: int = 0, prefill: tuple[int, int] | None = None) -> Any:
    """vLLM's metadata of one step: the batch's requests, then `padding` requests of length 0 as
    full graphs add them (rows of q, block table 0), then one (new tokens, length) of prefill."""
    requests, q, _ = batch.shape
    starts = [i * q for i in range(requests + 1)]
    lengths = batch.lengths.tolist()
    totals = lengths if batch.totals is None else batch.totals.tolist()
    starts += [starts[-1]] * padding
    totals, lengths = totals + [0] * padding, lengths + [0] * padding
    table = batch.block_table
    table = torch.cat([table, table.new_zeros(padding, table.shape[1])])
    tokens = (requests + padding) * q
    longest = q
    if prefill is not None:
        assert not padding
        starts.append(starts[-1] + prefill[0])
        totals.append(prefill[1])
        lengths.append(prefill[1])
        table = torch.cat([table, table.new_zeros(1, table.shape[1])])
        tokens += prefill[0]
        longest = max(q, prefill[0])
    i32 = torch.int32
    host_starts = torch.tensor(starts, dtype=i32)
    seq_lens = torch.tensor(totals, dtype=i32)
    return CommonAttentionMetadata(
        query_start_loc=host_starts.clone(),
        query_start_loc_cpu=host_starts,
        seq_lens=seq_lens,
        num_reqs=len(lengths),
        num_actual_tokens=tokens,
        max_query_len=longest,
        max_seq_len=16384,
        block_table_tensor=table,
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64),
        dcp_local_seq_lens=None if batch.totals is None else torch.tensor(lengths, dtype=i32),
        seq_lens_cpu_upper_bound=seq_lens.clone(),
    )
