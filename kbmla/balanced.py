# SPDX-License-Identifier: Apache-2.0
"""BalancedMla: the cores, plans and scratch of one model, as an attention backend uses them.

Per decode step: `require` (once, before graphs are captured), `plan` from the step's lengths, then
`decode` in every MLA layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .core import (
    CAPACITY,
    MIN_SPLIT_TOKENS,
    P_SCALE,
    KvBalancedMla,
    as_device,
    as_int,
    backend_of,
    supports,
)


def reducer_d_tiles(rows: int, device: torch.device | str) -> int:
    """What a core takes as `reducer_d_tiles` for a merge of `rows` query rows: 2 when the rows fill
    at most half of the device's last wave (SMs of a GPU, threads of a CPU), else 1. For
    callers of the interface that this one mirrors: the merge shares its columns by what it finds.
    """
    device = as_device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise NotImplementedError(
                f"device: expected cpu, torch sees no CUDA device, got {device}"
            )
        wave = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        wave = torch.get_num_threads()
    return 2 if -(-rows * 2 // wave) < 2 * -(-rows // wave) else 1


def supported(heads: int, q: int, device: torch.device | str) -> bool:
    """Whether `heads` x `q` query rows per request run on `device`. Never raises."""
    return supports(heads, q, device)


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class BalancedMla:
    """The balanced decode of `heads` heads (under DCP: those of every rank) on `device`.

    One per model. `dcp`: whether lengths are a shard's; it picks the table of size classes.
    policy, clusters, p_scale, partial_fp16 and backend are those of `KvBalancedMla`; p_scale=1.0 is
    stock.

    Attributes: `cores` and `plans` (counts, work) by `key`, `workspace` (int8), shared by all cores
    and used in stream order: steps of one BalancedMla belong on one stream, and on a CPU in one
    thread, at a time.
    """

    def __init__(
        self,
        heads: int,
        device: torch.device | str,
        dcp: bool,
        *,
        policy: str = "balanced",
        clusters: int | None = None,
        p_scale: float = P_SCALE,
        partial_fp16: bool = False,
        backend: str | None = None,
    ) -> None:
        self.heads, self.device, self.dcp = as_int("heads", heads), as_device(device), bool(dcp)
        self._numerics: dict[str, Any] = {"p_scale": p_scale, "partial_fp16": partial_fp16}
        self.cores: dict[tuple[int, int], KvBalancedMla] = {}
        self.plans: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._options: dict[str, Any] = {
            "policy": policy,
            "clusters": clusters,
            "backend": backend_of(self.device, backend),
        }
        self.workspace = torch.empty(0, dtype=torch.int8, device=self.device)
        # Buffers that grew are kept: a captured graph may still hold their addresses.
        self._outgrown: list[Tensor] = []
        self._planned: set[tuple[int, int]] = set()  # keys whose buffers hold a plan

    def key(self, q: int, requests: int) -> tuple[int, int]:
        """(q, capacity) of a step of `requests` requests: the core that decodes it."""
        for most, capacity in CAPACITY[self.dcp]:
            if requests <= most:
                return q, capacity
        raise ValueError(f"requests: expected at most {CAPACITY[self.dcp][-1][0]}, got {requests}")

    def require(self, q: int, requests: int) -> None:
        """Prepares steps of up to `requests` requests of `q` tokens: builds or grows a core and its
        buffers, or returns at once when there is one. Not during a graph's capture: RuntimeError.
        """
        q, requests = as_int("q", q), as_int("requests", requests)
        if requests < 0:
            raise ValueError(f"requests: expected at least 0, got {requests}")
        requests = max(requests, 1)  # an idle rank steps with none
        key = self.key(q, requests)
        core = self.cores.get(key)
        if core is not None and core.max_requests >= requests:
            return
        if _is_capturing(self.device):
            raise RuntimeError("the balanced MLA core must be prepared before capture")
        core = KvBalancedMla(
            self.heads,
            q,
            requests,
            True,
            self.device,
            key[1],
            MIN_SPLIT_TOKENS,
            reducer_d_tiles=reducer_d_tiles(self.heads * q * requests, self.device),
            **self._numerics,
            **self._options,
        )
        counts = torch.zeros(requests, dtype=torch.int32, device=self.device)
        work = torch.full((core.list_len,), -1, dtype=torch.int32, device=self.device)
        workspace = self.workspace
        if workspace.numel() < core.workspace_bytes:
            workspace = torch.empty(core.workspace_bytes, dtype=torch.int8, device=self.device)
        if self.device.type == "cuda":
            self._outgrown += self.plans.get(key, ())
            if workspace is not self.workspace:
                self._outgrown.append(self.workspace)
        self._planned.discard(key)
        self.cores[key], self.plans[key], self.workspace = core, (counts, work), workspace

    def plan(self, q: int, lengths: Tensor) -> None:
        """Plans this step from `lengths` [B] int32, this rank's KV tokens per request with the q
        new ones: once per step, before the decodes of its layers."""
        core, plan = self._prepared(q, lengths, "lengths")
        core.plan(lengths, *plan)
        self._planned.add(self.key(q, lengths.shape[0]))

    def decode(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        scales: tuple[float, float],
        out: Tensor,
        lse: Tensor | None = None,
        **dcp: Any,
    ) -> None:
        """Writes `out` [B, q, heads, 512] bf16 (and `lse` [B, q, heads] float32, log2) of `query`
        [B, q, heads, 576] e4m3fn over the paged `cache` [pages, page, 576] e4m3fn with the current
        plan.

        block_table: [B, max_pages] int32; lengths: [B] int32, as planned; scales: (softmax,
        output). Under DCP: `cp` = (world, rank, interleave) and `totals` [B] int32, the global
        lengths for the causal mask. Errors as in `KvBalancedMla.decode`.
        """
        unknown = dcp.keys() - {"cp", "totals"}
        if unknown:
            raise TypeError(f"decode: expected cp and totals, got {sorted(unknown)}")
        try:
            softmax, output_scale = scales
        except (TypeError, ValueError):
            raise ValueError(f"scales: expected (softmax, output), got {scales!r}") from None
        if isinstance(query, Tensor) and query.dim() != 4:
            raise ValueError(
                f"query: expected shape [B, q, {self.heads}, 576], got {list(query.shape)}"
            )
        if not isinstance(out, Tensor):
            raise TypeError(f"out: expected a torch.Tensor, got {type(out).__name__}")
        q = query.shape[1] if isinstance(query, Tensor) else -1
        core, (counts, work) = self._prepared(q, query, "query")
        if self.key(q, query.shape[0]) not in self._planned:
            raise RuntimeError(
                f"decode: expected a plan first, none was made for {query.shape[0]} requests of "
                f"{q} query tokens"
            )
        core.decode(
            query,
            cache,
            block_table,
            lengths,
            softmax,
            output_scale,
            counts,
            work,
            self.workspace,
            lse=lse,
            causal_lens=dcp.get("totals"),
            cp=dcp.get("cp", (1, 0, 1)),
            out=out,
            pdl=True,
        )

    def _prepared(
        self, q: int, tensor: Tensor, name: str
    ) -> tuple[KvBalancedMla, tuple[Tensor, Tensor]]:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        requests = tensor.shape[0] if tensor.dim() else 1
        key = self.key(q, requests)
        core = self.cores.get(key)
        if core is None or core.max_requests < requests:
            raise RuntimeError(
                f"{name}: {requests} requests of {q} tokens were not prepared; call "
                f"require({q}, {requests}) first"
            )
        return core, self.plans[key]
