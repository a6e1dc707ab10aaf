# SPDX-License-Identifier: Apache-2.0
"""Inputs of the tests: poisoned paged caches, probes with a known answer, hand-written plans.

Whatever a kernel may not read holds a value that shows if it does: every byte of the cache that no
request owns is 0x7F (NaN in E4M3), every unused column of the page table is 2^30, results start as
NaN and the workspace as NaN. Page ids are a random permutation that leaves page 0 unlisted.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kbmla import core as kbmla_core
from kbmla._lib import lib

FP8 = torch.float8_e4m3fn
NAN_BYTE = 0x7F
UNUSED_PAGE = 2**30
TILE = 128
LOG2E = math.log2(math.e)
SCALES = (0.06, 1.75)
NO_CP = (1, 0, 1)


# ---------------------------------------------------------------------------- backends

preferred: str | None = None  # the session's, where it is not the device's fastest


def prefer_backend(name: str | None) -> None:
    """Makes `name` the default of every device that has it. Once per process; None does nothing."""
    global preferred
    if name is None:
        return
    assert preferred is None
    preferred, known = name, kbmla_core._backends_of

    def preferred_first(device: torch.device) -> tuple[str, ...]:
        return tuple(sorted(known(device), key=lambda backend: backend != name))

    kbmla_core._backends_of = preferred_first


def backend_on(device: torch.device | str) -> str:
    """The backend of a core on `device` that names none."""
    return kbmla_core.backend_of(kbmla_core.as_device(device))


def has_fp22_scores(device: torch.device | str) -> bool:
    """Whether scores there are those of `reference.fp22_products` and not FP32 sums."""
    return backend_on(device) == "sm90"


# ---------------------------------------------------------------------------- rows of a request


def random_rows(lengths: Sequence[int], seed: int = 0, spread: float = 1.0) -> list[torch.Tensor]:
    """Gaussian cache rows of each request, [length, 576] e4m3."""
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(max(n, 0), 576, generator=g) * spread).to(FP8) for n in lengths]


def random_query(requests: int, q: int, heads: int, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(requests, q, heads, 576, generator=g).to(FP8)


def probe_rows(
    r: torch.Tensor | float, v: torch.Tensor | float, length: int | None = None
) -> torch.Tensor:
    """PROBE keys: rope channel 0 is r [n], the latent is v [n], [512] or [n, 512]; the score of a
    token under `probe_query(..., a)` is softmax * a * r, whatever its value is."""
    r, v = torch.as_tensor(r, dtype=torch.float32), torch.as_tensor(v, dtype=torch.float32)
    if length is None:
        length = r.shape[0]
    rows = torch.zeros(length, 576)
    rows[:, 512] = r
    rows[:, :512] = v.unsqueeze(-1) if v.ndim == 1 and v.shape[0] == length != 512 else v
    return rows.to(FP8)


def probe_query(requests: int, q: int, heads: int, a: float | torch.Tensor = 0.0) -> torch.Tensor:
    """PROBE query; `a` is a number or [requests, q, heads]."""
    query = torch.zeros(requests, q, heads, 576)
    query[..., 512] = torch.as_tensor(a, dtype=torch.float32)
    return query.to(FP8)


def mark_rows(length: int) -> torch.Tensor:
    """MARK keys: token t is one-hot at channel t mod 512, so out * n counts tokens."""
    rows = torch.zeros(length, 576)
    t = torch.arange(length)
    rows[t, t % 512] = 1.0
    return rows.to(FP8)


def mark_counts(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """How often each channel's token was counted, from a MARK result: integers [..., 512]. Exact
    while a count is below 2^7, where BF16 still tells neighbours apart."""
    seen = torch.exp2(lse.cpu().double()).round().unsqueeze(-1)
    return (out.cpu().double() * seen).round().to(torch.int64)


def expected_marks(seen: int) -> torch.Tensor:
    return torch.bincount(torch.arange(max(seen, 0)) % 512, minlength=512)


# ---------------------------------------------------------------------------- paged caches


def paged_cache(
    rows: Sequence[torch.Tensor],
    page: int,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    columns: int | None = None,
    unused: int = UNUSED_PAGE,
    poison: int = NAN_BYTE,
    spare: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache [pages, page, 576] e4m3 and block table [B, columns] int32 of the given requests.

    `columns` defaults to two more than the longest request needs; `spare` unlisted pages stand
    before and after the listed ones. `unused` fills unused table entries, `poison` unused bytes.
    """
    need = [-(-r.shape[0] // page) for r in rows]
    total = sum(need)
    g = torch.Generator().manual_seed(seed)
    ids = torch.randperm(total, generator=g) + spare
    width = max([*need, 0]) + 2 if columns is None else columns
    assert width >= max([*need, 0])
    table = torch.full((len(rows), width), unused, dtype=torch.int32)
    cache = torch.full((total + 2 * spare, page, 576), poison, dtype=torch.uint8)
    first = 0
    for b, r in enumerate(rows):
        mine = ids[first : first + need[b]]
        padded = torch.full((need[b] * page, 576), poison, dtype=torch.uint8)
        padded[: r.shape[0]] = r.view(torch.uint8)
        cache[mine] = padded.view(need[b], page, 576)
        table[b, : need[b]] = mine.to(torch.int32)
        first += need[b]
    return cache.to(device).view(FP8), table.to(device)


@dataclass
class Batch:
    """The tensors of one decode call and what they were made of."""

    query: torch.Tensor  # [B, q, heads, 576] e4m3
    cache: torch.Tensor  # [pages, page, 576] e4m3
    block_table: torch.Tensor  # [B, columns] int32
    lengths: torch.Tensor  # [B] int32
    rows: list[torch.Tensor]  # per request, [length, 576] e4m3 on the CPU
    scales: tuple[float, float] = SCALES
    totals: torch.Tensor | None = None
    cp: tuple[int, int, int] = NO_CP

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, q, heads)."""
        b, q, heads, _ = self.query.shape
        return b, q, heads

    def solo(self, b: int) -> Batch:
        """Request b in a batch of one, on the same cache."""
        return replace(
            self,
            query=self.query[b : b + 1],
            block_table=self.block_table[b : b + 1].contiguous(),
            lengths=self.lengths[b : b + 1].clone(),
            rows=self.rows[b : b + 1],
            totals=None if self.totals is None else self.totals[b : b + 1].clone(),
        )


def make_batch(
    lengths: Sequence[int],
    heads: int = 16,
    q: int = 1,
    *,
    device: torch.device | str = "cpu",
    page: int = 64,
    seed: int = 0,
    rows: Sequence[torch.Tensor] | None = None,
    query: torch.Tensor | None = None,
    scales: tuple[float, float] = SCALES,
    totals: Sequence[int] | None = None,
    cp: tuple[int, int, int] = NO_CP,
    columns: int | None = None,
    unused: int = UNUSED_PAGE,
    poison: int = NAN_BYTE,
) -> Batch:
    """A batch of requests of these lengths, Gaussian unless rows or query are given."""
    rows = list(rows) if rows is not None else random_rows(lengths, seed)
    assert [r.shape[0] for r in rows] == [max(n, 0) for n in lengths]
    query = random_query(len(lengths), q, heads, seed + 1) if query is None else query
    cache, table = paged_cache(
        rows, page, device, seed=seed, columns=columns, unused=unused, poison=poison
    )
    i32 = {"dtype": torch.int32, "device": device}
    return Batch(
        query.to(device),
        cache,
        table,
        torch.tensor(list(lengths), **i32),
        rows,
        scales,
        None if totals is None else torch.tensor(list(totals), **i32),
        cp,
    )


def probe_batch(
    rows: Sequence[torch.Tensor],
    heads: int = 16,
    q: int = 1,
    a: float | torch.Tensor = 0.0,
    softmax: float = 1.0,
    output_scale: float = 1.0,
    **kwargs,
) -> Batch:
    """A batch of PROBE or MARK requests."""
    return make_batch(
        [r.shape[0] for r in rows],
        heads,
        q,
        rows=rows,
        query=probe_query(len(rows), q, heads, a),
        scales=(softmax, output_scale),
        **kwargs,
    )


# ---------------------------------------------------------------------------- context parallel


def local_length(total: int, world: int, rank: int, interleave: int) -> int:
    """How many of the first `total` tokens live on `rank`, counted one by one."""
    return sum((i // interleave) % world == rank for i in range(max(total, 0)))


def shard(rows: torch.Tensor, world: int, rank: int, interleave: int) -> torch.Tensor:
    """The rows that `rank` holds, in order."""
    i = torch.arange(rows.shape[0])
    return rows[(i // interleave) % world == rank]


# ---------------------------------------------------------------------------- running a core


def make_core(
    heads: int,
    q: int,
    requests: int,
    device: torch.device | str = "cpu",
    *,
    clusters: int | None = 64,
    causal: bool = True,
    capacity: int = 4096,
    min_split_tokens: int = 128,
    **kwargs,
) -> kbmla_core.KvBalancedMla:
    """A core that can split a lot: 64 clusters unless told otherwise, splits of one tile."""
    return kbmla_core.KvBalancedMla(
        heads,
        q,
        requests,
        causal,
        torch.device(device),
        capacity,
        min_split_tokens,
        clusters=clusters,
        **kwargs,
    )


def core_for(batch: Batch, **kwargs) -> kbmla_core.KvBalancedMla:
    b, q, heads = batch.shape
    return make_core(heads, q, max(b, 1), batch.query.device, **kwargs)


def normal_count(length: int, count: int) -> int:
    """The count without empty splits, at least 1."""
    tiles = -(-max(length, 0) // TILE)
    if tiles == 0:
        return 1
    per = -(-tiles // min(max(count, 1), tiles, 256))
    return -(-tiles // per)


Plan = tuple[torch.Tensor, torch.Tensor]


def new_plan(core: kbmla_core.KvBalancedMla, device: torch.device | str) -> Plan:
    """Plan buffers that hold rubbish, as a plan must not rely on what it finds."""
    counts = torch.full((core.max_requests,), 0x5A5A5A5A, dtype=torch.int32, device=device)
    work = torch.full((core.list_len,), 0x5A5A5A5A, dtype=torch.int32, device=device)
    return counts, work


def auto_plan(core: kbmla_core.KvBalancedMla, lengths: torch.Tensor) -> Plan:
    """The plan of the core's own planner."""
    counts, work = new_plan(core, lengths.device)
    core.plan(lengths, counts, work)
    return counts, work


def manual_plan(
    core: kbmla_core.KvBalancedMla, lengths: torch.Tensor, counts: int | Sequence[int]
) -> Plan:
    """A plan with these split counts (normalised), written as csrc/rules.h describes."""
    sizes, host = core.sizes, lengths.cpu().tolist()
    requests = len(host)
    wanted = [counts] * requests if isinstance(counts, int) else list(counts)
    final = [normal_count(n, c) for n, c in zip(host, wanted, strict=True)]
    entries: list[int] = []
    bases: list[int] = []
    slots = 0
    for c in final:
        bases.append(slots)
        slots += c * sizes.num_q_tiles if c > 1 else 0
    for tile in range(sizes.num_q_tiles):
        for b, c in enumerate(final):
            entries += [(tile * requests + b) << 8 | split for split in range(c)]
    assert slots <= sizes.max_partials, f"{slots} partials, the core has {sizes.max_partials}"
    tail = core.list_len - core.max_requests
    assert len(entries) + core.clusters <= tail, "the list does not hold this plan"
    work = torch.full((core.list_len,), -1, dtype=torch.int32)
    work[: len(entries)] = torch.tensor(entries, dtype=torch.int32)
    work[tail : tail + requests] = torch.tensor([~x for x in bases], dtype=torch.int32)
    full = torch.ones(core.max_requests, dtype=torch.int32)
    full[:requests] = torch.tensor(final, dtype=torch.int32)
    return full.to(lengths.device), work.to(lengths.device)


def new_workspace(core: kbmla_core.KvBalancedMla, device: torch.device | str, fill: int = NAN_BYTE):
    """A workspace full of one byte: 0x7F and 0xFF are NaN as FP32 and as FP16."""
    return torch.full((core.workspace_bytes,), fill, dtype=torch.uint8, device=device).view(
        torch.int8
    )


def new_out(batch: Batch, fill: float = math.nan) -> tuple[torch.Tensor, torch.Tensor]:
    b, q, heads = batch.shape
    device = batch.query.device
    out = torch.full((b, q, heads, 512), fill, dtype=torch.bfloat16, device=device)
    return out, torch.full((b, q, heads), fill, dtype=torch.float32, device=device)


def decode(
    core: kbmla_core.KvBalancedMla,
    batch: Batch,
    plan: Plan | int | Sequence[int] | None = None,
    *,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes a batch and returns (out, lse). `plan` is a pair of buffers, split counts (one for
    all requests or one each), or None for the core's planner."""
    # Also with a written plan: a core decodes only after it planned a step of this many requests.
    planned = auto_plan(core, batch.lengths)
    if plan is None:
        plan = planned
    elif isinstance(plan, int) or not isinstance(plan[0], torch.Tensor):
        plan = manual_plan(core, batch.lengths, plan)
    fresh_out, fresh_lse = new_out(batch)
    out = fresh_out if out is None else out
    lse = fresh_lse if lse is None else lse
    core.decode(
        batch.query,
        batch.cache,
        batch.block_table,
        batch.lengths,
        *batch.scales,
        *plan,
        new_workspace(core, batch.query.device) if workspace is None else workspace,
        lse=lse if with_lse else None,
        causal_lens=batch.totals,
        cp=batch.cp,
        out=out,
    )
    return out, lse


def planned_counts(core: kbmla_core.KvBalancedMla, lengths: torch.Tensor) -> list[int]:
    return auto_plan(core, lengths)[0][: lengths.numel()].cpu().tolist()


def valid_entries(work: torch.Tensor) -> list[int]:
    """The prefix of a work list; everything after it must be negative."""
    host = work.cpu().tolist()
    first = next((i for i, e in enumerate(host) if e < 0), len(host))
    assert all(e < 0 for e in host[first:]), "a valid entry follows a negative one"
    return host[:first]


# ---------------------------------------------------------------------------- memory fences


@contextmanager
def guarded(
    tensor: torch.Tensor, margin: int = 4096, fill: int = NAN_BYTE
) -> Iterator[torch.Tensor]:
    """A contiguous copy of `tensor` cut from a larger allocation whose other bytes must not change;
    checked on leaving."""
    size = tensor.numel() * tensor.element_size()
    big = torch.full((size + 2 * margin,), fill, dtype=torch.uint8, device=tensor.device)
    inner = big[margin : margin + size].view(tensor.dtype).view(tensor.shape)
    inner.copy_(tensor)
    yield inner
    around = torch.cat([big[:margin], big[margin + size :]])
    assert bool((around == fill).all()), "bytes around the tensor were written"


class Fence:
    """CPU tensors that end (or begin) exactly at a page without access rights: a read or write
    one byte outside is a segmentation fault. For child processes (`in_child`)."""

    def __init__(self, at_end: bool = True):
        self.at_end = at_end
        self.keep: list[mmap.mmap] = []
        self.libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `tensor` against the fence."""
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return tensor.clone()
        body = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, body + mmap.PAGESIZE)
        self.keep.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        fence = start + body if self.at_end else start
        status = self.libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(mmap.PAGESIZE), 0)
        assert status == 0, f"mprotect: errno {ctypes.get_errno()}"
        offset = body - size if self.at_end else mmap.PAGESIZE
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
        copy = flat.view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        return copy


def in_child(module: str, function: str, *args, seconds: int = 20, env: dict | None = None) -> str:
    """Runs `module.function(*args)` of tests/ in a fresh process and returns what it printed.

    After its imports the child has `seconds` (WATCH); a hang is ended by its own watchdog, with the
    stack of every thread in the error. Arguments travel as their repr.
    """
    code = (
        f"import faulthandler, cases, {module} as m; faulthandler.enable()\n"
        f"cases.prefer_backend({preferred!r})\n"
        f"faulthandler.dump_traceback_later({seconds}, exit=True)\n"
        f"m.{function}(*{args!r})\nfaulthandler.cancel_dump_traceback_later()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=seconds + 100,
        check=False,
    )
    assert done.returncode == 0, (
        f"{module}.{function}{args!r} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    )
    return done.stdout


# ---------------------------------------------------------------------------- CPU details


@contextmanager
def cpu_isa(name: str) -> Iterator[bool]:
    """Runs the body on one instruction set; yields False where this machine lacks it."""
    lib.kbmla_cpu_select_isa.argtypes = [ctypes.c_char_p]
    status = lib.kbmla_cpu_select_isa(name.encode())
    try:
        assert (lib.kbmla_cpu_isa().decode() == name) == (status == 0)
        yield status == 0
    finally:
        assert lib.kbmla_cpu_select_isa(None) == 0
