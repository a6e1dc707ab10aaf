# SPDX-License-Identifier: Apache-2.0
"""The three classes of an MLA backend in vLLM, over kbmla: its description, the builder that plans
once per step, and the implementation that decodes once per layer.

Prefill, chunked prefill, cache writes and the merge over DCP ranks are vLLM's own, inherited. The
builder runs on the host in front of each step, outside of graphs, and launches the plan into
buffers of fixed address that the captured decodes read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import BalancedMla
from .._lib import has_cuda_kernels
from ..core import LEAST_CAPABILITY, SM90_CAPABILITY, KvBalancedMla
from . import releases

releases.require_supported()  # before names are imported that other releases may lack

from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none  # noqa: E402
from vllm.logger import init_logger  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import (  # noqa: E402
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from .buffers import shared  # noqa: E402

_log = init_logger("vllm.kbmla")

HEAD_DIM_V, HEAD_DIM_ROPE = 512, 64
BLOCK_SIZE = 64  # tokens; the kernels' fast page size


def _refusal(heads: int, max_q: int, max_requests: int) -> str | None:
    """Why kbmla cannot run steps of up to `max_requests` requests of `max_q` query tokens with
    `heads` heads, in the words of its own checks, or None."""
    try:
        KvBalancedMla(heads, max_q, max_requests, True, "cpu", 0, 1)
    except (ValueError, NotImplementedError) as error:
        return f"kbmla: {error}"
    return None


def _say_which_kernel(device: torch.device) -> None:
    """Says once in the log that a card other than Hopper is served by the portable kernel."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability != SM90_CAPABILITY:
            _log.info_once(
                "kbmla: compute capability %d.%d: the portable CUDA kernel serves", *capability
            )


class KbmlaBackend(MLACommonBackend):
    """What the backend supports; vLLM prints a reason for each thing that it does not."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return releases.backend_name(AttentionBackendEnum)

    @staticmethod
    def get_builder_cls() -> type[KbmlaMetadataBuilder]:
        return KbmlaMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[KbmlaImpl]:
        return KbmlaImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int]:
        return [BLOCK_SIZE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [HEAD_DIM_V + HEAD_DIM_ROPE]

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Pages outermost, also across layers: the kernels take the page's stride from the cache.
        vLLM 0.26 to 0.28 ask this way; later ones take any layout that is not restricted."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool((capability.major, capability.minor) >= LEAST_CAPABILITY)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # One query length for the whole step is read on the host.
        return False

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """The limits that vLLM has no argument for: heads, query tokens and requests of a step."""
        config = get_current_vllm_config_or_none()
        if config is None or config.model_config is None:
            return None
        if config.device_config.device_type == "cuda" and not has_cuda_kernels():
            return "kbmla: this build has no CUDA kernels; build it where nvcc is found"
        parallel = config.parallel_config
        heads = config.model_config.get_num_attention_heads(parallel)
        return _refusal(
            heads * parallel.decode_context_parallel_size,
            releases.max_query_len(config),
            config.scheduler_config.max_num_seqs,
        )


def _builders(config: Any) -> int:
    """Metadata builders that an engine makes for layers of one shape: one for the model and one for
    a drafter with MLA layers, each for every micro-batch."""
    speculative = config.speculative_config
    has_drafter = (
        speculative is not None
        and (speculative.use_eagle() or speculative.method == "draft_model")
        and speculative.draft_model_config.use_mla
    )
    return (1 + bool(has_drafter)) * max(1, int(config.parallel_config.num_ubatches))


@dataclass
class KbmlaDecodeMetadata(MLACommonDecodeMetadata):
    """The decode half of a step's metadata: vLLM's tensors, and what the step was planned with.

    block_table: [B, max_pages] int32; seq_lens: [B] int32, this rank's KV tokens; dcp_tot_seq_lens:
    [B] int32 global lengths under DCP, else None; mla: the group's BalancedMla, holding the plan;
    query_len: query tokens of every request. B counts the requests that pad a graph.
    """

    mla: BalancedMla
    query_len: int


class KbmlaMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Owns the plans and scratch of one KV-cache group and plans each of its steps.

    Attribute `mla`: the BalancedMla, prepared at construction for every step that vLLM counts as
    decode, so that no step and no capture allocates.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        # Causal bounds are global positions here, so several query tokens are right under DCP too.
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            MLACommonMetadata,
            supports_dcp_with_varlen=True,
        )
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.mla = layer.impl.buffers.claim(
            self, device, self.reorder_batch_threshold, vllm_config.scheduler_config.max_num_seqs
        )
        _say_which_kernel(device)

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        num_decode_tokens: int,
        query_start_loc_cpu: Tensor,
        dcp_tot_seq_lens_device: Tensor | None,
        **_: Any,
    ) -> KbmlaDecodeMetadata:
        """Launches the step's one plan; see KbmlaDecodeMetadata. The lengths stay on the device."""
        # The first request is real; the last ones may be padding, without query tokens.
        # Where pieces of a graph are padded there are more of these than padded tokens.
        query_len = max(1, int(query_start_loc_cpu[1] - query_start_loc_cpu[0]))
        requests, rest = divmod(num_decode_tokens, query_len)
        even = torch.arange(query_start_loc_cpu.shape[0], dtype=query_start_loc_cpu.dtype)
        even = even.mul_(query_len).clamp_(max=query_start_loc_cpu[-1])
        if (
            rest
            or requests > seq_lens_device.shape[0]
            or not torch.equal(query_start_loc_cpu, even)
        ):
            raise RuntimeError(
                f"num_decode_tokens: expected {query_len} query tokens for each of up to "
                f"{seq_lens_device.shape[0]} requests, got {num_decode_tokens} in all and "
                f"query_start_loc {query_start_loc_cpu.tolist()}"
            )
        seq_lens = seq_lens_device[:requests]
        totals = None if dcp_tot_seq_lens_device is None else dcp_tot_seq_lens_device[:requests]
        self.mla.plan(query_len, seq_lens)
        return KbmlaDecodeMetadata(
            block_table=block_table_tensor[:requests],
            seq_lens=seq_lens,
            dcp_tot_seq_lens=totals,
            mla=self.mla,
            query_len=query_len,
        )


class KbmlaImpl(MLACommonImpl[MLACommonMetadata]):
    """Decodes one layer with the plan of its step."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = False
    supports_dcp: bool = True
    # With it the heads of a step are not those of its DCP ranks.
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        for name, value, allowed in (
            ("alibi_slopes", alibi_slopes, (None,)),
            ("sliding_window", sliding_window, (None,)),
            ("logits_soft_cap", logits_soft_cap, (None, 0)),
            ("attn_type", attn_type, (AttentionType.DECODER,)),
            ("kv_cache_dtype", kv_cache_dtype, KbmlaBackend.supported_kv_cache_dtypes),
            ("kv_lora_rank", self.kv_lora_rank, (HEAD_DIM_V,)),
            ("qk_rope_head_dim", self.qk_rope_head_dim, (HEAD_DIM_ROPE,)),
        ):
            if value not in allowed:
                expected = " or ".join(repr(one) for one in allowed)
                raise NotImplementedError(f"kbmla: {name}: expected {expected}, got {value!r}")
        config = get_current_vllm_config()
        # Not self.dcp_world_size: vLLM 0.26 and 0.27 set it with the first forward.
        dcp = config.parallel_config.decode_context_parallel_size
        heads = num_heads * dcp
        max_q = releases.max_query_len(config)
        max_requests = config.scheduler_config.max_num_seqs
        # A drafter's heads are its own, so the backend's check has not seen them all.
        refusal = _refusal(heads, max_q, max_requests)
        if refusal is not None:
            raise NotImplementedError(refusal)
        # Kept whole: the interleave of the DCP shards may be settled after the model is built.
        self._parallel_config = config.parallel_config
        self.buffers = shared(
            heads, config.device_config.device, dcp > 1, max_q, max_requests, _builders(config)
        )

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the step's decode tokens in latent space.

        q: [T, heads, 576] e4m3fn, the latent 512 first, T = requests * query tokens, heads those of
        every DCP rank; kv_c_and_k_pe_cache: [pages, 64, 576] e4m3fn, any page stride; layer: has
        the floats `_q_scale_float` and `_k_scale_float`. Returns a new [T, heads, 512] bf16, rows
        of requests without keys zero, and under DCP the lse [T, heads] float32 in base 2, -inf for
        such rows, else None.
        """
        if not isinstance(q, Tensor):
            raise TypeError("q: expected one quantised torch.Tensor, got a tuple of its two parts")
        decode = attn_metadata.decode
        query = q.unflatten(0, (decode.seq_lens.shape[0], decode.query_len))
        out = torch.empty(*query.shape[:-1], HEAD_DIM_V, dtype=torch.bfloat16, device=query.device)
        lse, dcp = None, {}
        if self.dcp_world_size > 1:
            lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
            interleave = self._parallel_config.cp_kv_cache_interleave_size
            dcp = {
                "cp": (self.dcp_world_size, self.dcp_rank, interleave),
                "totals": decode.dcp_tot_seq_lens,
            }
        # V is the latent part of K, so its scale is K's.
        scales = (self.scale * layer._q_scale_float * layer._k_scale_float, layer._k_scale_float)
        decode.mla.decode(
            query,
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens,
            scales,
            out,
            lse,
            **dcp,
        )
        return out.flatten(0, 1), None if lse is None else lse.flatten(0, 1)
