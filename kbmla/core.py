# SPDX-License-Identifier: Apache-2.0
"""One core: a query length and a size class, with what its plans and decodes need.

Mirrors the interface of the kv_balanced_mla core: buffers belong to the caller, who asks here for
their sizes. `BalancedMla` (balanced.py) owns cores and buffers for a model.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from . import ops
from ._lib import Config, config_sizes, has_cuda_kernels, prepare

# Per DCP setting: (most requests, entries a plan may hold beyond one per request and q tile).
# Chosen on the model of benchmarks/simulate_plan.py: larger ones gain nothing more.
_CAPACITY = ((16, 132), (64, 264), (256, 396), (1024, 640))
CAPACITY: dict[bool, tuple[tuple[int, int], ...]] = {False: _CAPACITY, True: _CAPACITY}
# One KV tile: longer minima cost short steps more than they save, on the same model.
MIN_SPLIT_TOKENS = 128
# Stock scale of P before its E4M3 rounding: P below 2^-10 rounds to 0, and a row maximum is kept
# until a score is 2^8 above it, so the strongest keys are rounded too.
TOKENSPEED_P_SCALE = 1.0
# What BalancedMla takes by itself: the widest range of E4M3 below its strongest key, and an exact
# row maximum. Stock exceeds a relative error of 0.02 on Gaussian requests of 100 to 2,000 tokens
# (0.0216 at 513), this does not (0.017); the README's precision section has the table.
P_SCALE = 256.0

POLICIES = ("balanced", "equal", "fixed")
# In the order of C's kbmla_backend: any CPU, any card from SM80 on, H100 and H200.
BACKENDS = ("cpu", "cuda", "sm90")
LEAST_CAPABILITY = (8, 0)
SM90_CAPABILITY = (9, 0)
_MAX_CPU_CLUSTERS = 4096
_P_SCALES = tuple(2**i for i in range(9))


def as_device(device: torch.device | str) -> torch.device:
    """The device with its index; TypeError or ValueError for what is none."""
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"device: expected a torch.device or str, got {type(device).__name__}")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected cpu or cuda, got {device!r}") from error
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found


def as_int(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        got = type(value).__name__
        raise TypeError(f"{name}: expected an integer, got {value!r} ({got})") from None


def backend_of(device: torch.device, backend: str | None = None) -> str:
    """The fastest backend on `device`, or `backend` if it runs there; else NotImplementedError."""
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend: expected None or one of {BACKENDS}, got {backend!r}")
    found = _backends_of(device)
    if backend is None:
        return found[0]
    if backend not in found:
        raise NotImplementedError(f"backend: expected one of {found} on {device}, got {backend!r}")
    return backend


def _backends_of(device: torch.device) -> tuple[str, ...]:
    """Backends that run on `device`, fastest first; NotImplementedError if there is none."""
    if device.type == "cpu":
        return ("cpu",)
    if device.type != "cuda":
        raise NotImplementedError(f"device: expected cpu or cuda, got {device}")
    if not has_cuda_kernels():
        raise NotImplementedError(
            f"device: expected cpu (this build of kbmla has no CUDA kernels), got {device}"
        )
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= number:
        raise NotImplementedError(
            f"device: expected cpu or one of {number} CUDA devices that torch sees, got {device}"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise NotImplementedError(
            f"device: expected compute capability 8.0 or later, got {capability} of {device}"
        )
    return ("sm90", "cuda") if capability == SM90_CAPABILITY else ("cuda",)


def supports(heads: int, q: int, device: torch.device | str) -> bool:
    """Whether a core of `heads` x `q` query rows per request runs on `device`. Never raises."""
    try:
        backend = BACKENDS.index(backend_of(as_device(device)))
        config_sizes(Config(heads, q, 1, 1, 0, 1, 0, backend, 1, 0, 1, 1))
    except Exception:
        return False
    return True


class KvBalancedMla:
    """A core of `heads` heads and `q` query tokens for steps of up to `requests` requests.

    heads: 1..128 of this rank; q >= 1, heads * q <= 1024; requests: 1..1024; causal: whether query
    token t of q sees keys only up to its own position; capacity: entries a plan may hold beyond one
    per (request, q tile), further limited by the workspace's budget; min_split_tokens: the least a
    split is worth; partial_fp16: unmerged results as FP16; p_scale: power of two in 1..256, factor
    of P before its E4M3 rounding; reducer_d_tiles: 1 or 2, for callers of the interface that this
    one mirrors, without effect; clusters: width of the wave, an input of the plan (None: this
    device's); policy: "balanced", "equal" or "fixed"; backend: "cpu", "cuda" (portable) or "sm90"
    (None: the device's fastest).

    ValueError or NotImplementedError names what does not fit. Allocates nothing on the device.
    Attributes: `max_requests`; `list_len`, int32 elements of a work list; `workspace_bytes`;
    `clusters`; `sizes`.
    """

    def __init__(
        self,
        heads: int,
        q: int,
        requests: int,
        causal: bool,
        device: torch.device | str,
        capacity: int,
        min_split_tokens: int,
        partial_fp16: bool = False,
        p_scale: float = 1.0,
        reducer_d_tiles: int = 1,
        *,
        clusters: int | None = None,
        policy: str = "balanced",
        backend: str | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {POLICIES}, got {policy!r}")
        if p_scale not in _P_SCALES:
            raise ValueError(f"p_scale: expected a power of two in 1..256, got {p_scale!r}")
        for name, flag in (("causal", causal), ("partial_fp16", partial_fp16)):
            if flag not in (True, False):
                raise TypeError(f"{name}: expected a bool, got {flag!r}")
        self.device = as_device(device)
        self.heads, self.q = as_int("heads", heads), as_int("q", q)
        self.max_requests = as_int("requests", requests)
        config = Config(
            num_heads=self.heads,
            q_len=self.q,
            max_requests=self.max_requests,
            num_clusters=1 if clusters is None else as_int("clusters", clusters),
            capacity=as_int("capacity", capacity),
            min_split_tokens=as_int("min_split_tokens", min_split_tokens),
            policy=POLICIES.index(policy),
            backend=BACKENDS.index(backend_of(self.device, backend)),
            causal=int(causal),
            partial_fp16=int(partial_fp16),
            reducer_d_tiles=as_int("reducer_d_tiles", reducer_d_tiles),
            p_scale=int(p_scale),
        )
        config_sizes(config)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                wave = prepare(config)
        else:
            wave = min(torch.get_num_threads(), _MAX_CPU_CLUSTERS)
        self.clusters = wave if clusters is None else config.num_clusters
        self.config = config._replace(num_clusters=self.clusters)
        self.sizes = config_sizes(self.config)
        self.list_len = self.sizes.list_len
        self.workspace_bytes = self.sizes.workspace_bytes

    def plan(self, lengths: Tensor, counts: Tensor, work: Tensor) -> None:
        """Plans one step from `lengths` [B] int32 into `counts` [>= B] and `work` [>= list_len].

        One kernel on the current stream; reads only `lengths`, rewrites the whole list.
        """
        ops.plan(lengths, counts, work, self.config)
        # With the list, since the packing of its entries depends on it.
        work._kbmla_requests = lengths.numel()  # type: ignore[attr-defined]

    def decode(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        softmax: float,
        output_scale: float,
        counts: Tensor,
        work: Tensor,
        workspace: Tensor,
        lse: Tensor | None = None,
        causal_lens: Tensor | None = None,
        cp: tuple[int, int, int] = (1, 0, 1),
        out: Tensor | None = None,
        pdl: bool = True,
    ) -> Tensor:
        """Decodes one layer with the current plan; returns `out`.

        query: [B*q, heads, 576] or [B, q, heads, 576] e4m3fn; cache: [pages, page, 576] e4m3fn, K =
        all 576 and V = the first 512 of a row; block_table: [B, max_pages] int32, token n of
        request b lies in page table[b, n // page], slot n % page; lengths: [B] int32 local KV
        tokens, the q new ones included; softmax and output_scale: host floats > 0; causal_lens: [B]
        int32 global lengths under DCP; cp: (world, rank, interleave); out: [B, q, heads, 512] bf16
        and lse: [B, q, heads] float32 log2 (or both with B*q merged), written whole; pdl: on a GPU,
        chain to the kernels before and after by programmatic dependent launch: lengths, counts and
        work are then read before the kernel in front has ended, and again when it has.

        A row that sees no key gets out 0 and lse -inf. Without `out` a new tensor is made, the one
        allocation here. ValueError names the argument that does not fit, RuntimeError a plan of
        another number of requests (known of a `work` tensor that `plan` was given); nothing is
        written then.
        """
        if isinstance(query, Tensor) and query.dim() == 3:
            query = self._per_request("query", query)
        if out is None:
            shape = (*query.shape[:-1], 512)
            out = torch.empty(shape, dtype=torch.bfloat16, device=query.device)
        written = out
        if isinstance(out, Tensor) and out.dim() == 3:
            out = self._per_request("out", out)
        if isinstance(lse, Tensor) and lse.dim() == 2:
            lse = self._per_request("lse", lse)
        planned = getattr(work, "_kbmla_requests", None)
        requests = query.shape[0] if isinstance(query, Tensor) and query.dim() == 4 else planned
        if planned is not None and requests != planned:
            raise RuntimeError(
                f"decode: expected a plan of {requests} requests, as query has, the last one in "
                f"work was of {planned}"
            )
        ops.decode(
            query, cache, block_table, lengths, causal_lens, counts, work, workspace, out, lse,
            softmax, output_scale, cp, pdl, self.config,
        )  # fmt: skip
        return written

    def _per_request(self, name: str, tensor: Tensor) -> Tensor:
        """View of [B*q, ...] as [B, q, ...], whatever the strides."""
        if tensor.shape[0] % self.q:
            raise ValueError(
                f"{name}: expected a first dimension divisible by q = {self.q}, got shape "
                f"{list(tensor.shape)}"
            )
        view: Tensor = tensor.unflatten(0, (tensor.shape[0] // self.q, self.q))
        return view
