# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's whole engine run on a CPU from a wheel for CUDA, which holds no kernels for it.

Each missing kernel gets a plain torch formulation here; layers take their own `forward_native`.
Decode attention is not among them: it is kbmla's.
"""

from __future__ import annotations

from typing import Any

import engine_cpu
import torch
import vllm._custom_ops as custom_ops
import vllm.model_executor.layers.linear as linear
import vllm.model_executor.layers.utils as layer_utils
import vllm.model_executor.layers.vocab_parallel_embedding as embedding
import vllm.model_executor.models.deepseek_v2  # noqa: F401  defines the layers that are patched
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms.cpu import CpuPlatform

BLOCK = 64


class TorchPrefill(engine_cpu.NoPrefill):
    """Prefill of whole prompts: causal attention request by request."""

    def __init__(self, *_: Any, scale: float, **__: Any) -> None:
        self.scale = scale

    def prepare_metadata(self, metadata: Any) -> None:
        self.starts = metadata.query_start_loc.tolist()

    def run_prefill_new_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, out: Any = None, **__: Any
    ) -> torch.Tensor:
        """q, k: [tokens, heads, dimensions]; v: its own dimensions; the result is like v, with
        q's dtype."""
        result = torch.empty(v.shape, dtype=q.dtype) if out is None else out.view(v.shape)
        for begin, end in zip(self.starts, self.starts[1:], strict=False):
            mine = [part[begin:end].float().transpose(0, 1) for part in (q, k, v)]
            result[begin:end] = torch.nn.functional.scaled_dot_product_attention(
                *mine, is_causal=True, scale=self.scale
            ).transpose(0, 1)
        return result


def write_cache(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    skip_scale: bool = False,
) -> None:
    """Rows [tokens, 512] and [tokens, 64] into slots of the FP8 cache; a negative slot is none."""
    rows = torch.cat([latent, rope], -1)[: slots.shape[0]]
    real = slots >= 0
    rows = (rows[real].float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    cache.view(torch.uint8)[slots[real] // BLOCK, slots[real] % BLOCK] = rows


def map_slots(
    starts: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    block: int,
) -> None:
    """Slot of each new token in the paged cache; -1 beyond the last."""
    slots.fill_(-1)
    for row, (begin, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
        place = positions[begin:end]
        slots[begin:end] = block_table[row][place // block].long() * block + place % block


def accept_greedy(
    tokens: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    best: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
    most: int,
) -> None:
    """Greedy verification: a request's tokens up to its first rejected draft, else all and the
    bonus token."""
    begin = 0
    for row, end in enumerate(ends.tolist()):
        for place in range(end - begin):
            tokens[row, place] = best[begin + place]
            if drafts[begin + place] != best[begin + place]:
                break
        else:
            tokens[row, end - begin] = bonus.flatten()[row]
        begin = end


def expand(
    output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, old: int, new: int
) -> None:
    """A request's value for each of its draft tokens, `old` replaced by `new`."""
    begin = 0
    for row, end in enumerate(ends.tolist()):
        output[begin:end] = new if values[row] == old else values[row]
        begin = end


def count_rejected(
    ends: torch.Tensor,
    valid: torch.Tensor,
    starts: torch.Tensor,
    places: torch.Tensor,
    rejected: torch.Tensor,
    requests: int,
) -> None:
    """Of each request its rejected drafts and the place of its last valid token, which a drafter
    goes on from. `ends` are those of the drafts, `valid` counts the bonus token too."""
    drafts = ends.diff(prepend=ends.new_zeros(1))
    rejected.copy_(torch.where(drafts > 0, drafts + 1 - valid, 0))
    places.copy_(starts[1 : requests + 1] - 1 - rejected)


def last_valid(
    sampled: torch.Tensor,
    discarded: torch.Tensor,
    backup: torch.Tensor,
    tokens: torch.Tensor,
    valid: torch.Tensor,
    vocabulary: int,
    *_: int,
) -> None:
    """Of each request its valid sampled tokens (rejected ones are -1) and the last of them, or the
    backup token where there is none."""
    fine = (sampled >= 0) & (sampled < vocabulary)
    count = fine.sum(1) * ~discarded[: len(fine)]
    last = sampled.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    valid.copy_(count)
    tokens.copy_(torch.where(count > 0, last, backup[: len(fine)]))


def step_drafter(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    next_positions: torch.Tensor,
    slots: torch.Tensor,
    block: int,
    longest: int,
    no_slot: int,
) -> None:
    """One more token for each request of a drafter; the requests here stay below `longest`."""
    requests = len(positions)
    place = positions + 1
    assert place.max() < longest
    pages = block_table[torch.arange(requests), place // block].long()
    slots.fill_(no_slot)
    slots[:requests] = pages * block + place % block
    next_positions.copy_(place)
    lengths += 1


def plain_linear(layer: Any, remove_weight: bool = True) -> None:
    layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, layer.weight, bias)


def use_native(cls: type) -> None:
    """Layers compute by their torch formulation, also those that name a kernel when constructed."""
    for sub in cls.__subclasses__():
        if hasattr(sub, "forward_native"):
            sub.forward_cpu = lambda self, *a, **k: self.forward_native(*a, **k)
            sub.forward_cuda = sub.forward_cpu
        use_native(sub)


def install(backend: Any) -> None:
    """Makes vLLM's CPU platform serve with `backend`'s class, whatever it was asked for."""
    path = f"{backend.__module__}.{backend.__qualname__}"
    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *_, **__: path)
    engine_cpu.mla_attention.get_mla_prefill_backend = lambda config: TorchPrefill
    custom_ops.concat_and_cache_mla = write_cache
    for module in (layer_utils, linear, embedding):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = plain_linear
    use_native(CustomOp)
    kernels = torch.ops._C
    kernels.init_cpu_memory_env = lambda *_: None
    kernels.init_cpu_threads_env = lambda *_: ""
    kernels.compute_slot_mapping_kernel_impl = map_slots
    kernels.rejection_greedy_sample_kernel_impl = accept_greedy
    kernels.expand_kernel_impl = expand
    kernels.eagle_prepare_inputs_padded_kernel_impl = count_rejected
    kernels.eagle_prepare_next_token_padded_kernel_impl = last_valid
    kernels.eagle_step_slot_mapping_metadata_kernel_impl = step_drafter
    # Of random sampling, which only the warm-up does.
    kernels.sample_recovered_tokens_kernel_impl = lambda *_: None
    kernels.rejection_random_sample_kernel_impl = lambda *_: None
    kernels.greedy_argmax = lambda logits: logits.argmax(-1)
    kernels.silu_and_mul = None  # named by a layer's constructor, never called
