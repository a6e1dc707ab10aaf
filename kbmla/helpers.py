# SPDX-License-Identifier: Apache-2.0
"""Tile layout, tile shapes, architecture names, and the walks by which CTAs find their work.

The scheduler classes are views of the C walks in `csrc/scheduler.h`: every tile they report and
every step they make is computed by the functions that the kernels and the CPU backend inline.
Names, arguments and results follow vLLM's `kimi_k3.nvidia.kv_balanced_mla.helpers`. Arguments
that exist there for a compiler only (`loc`, `ip`, the `*_fdd` divisors) may be given as
None; a value is refused with ValueError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ._lib import lib
from .core import as_int

__all__ = [
    "MLAStaticTileScheduler",
    "MLAStaticTileSchedulerParams",
    "MLAWorkListTileScheduler",
    "WorkTileInfo",
    "compute_q_tile_layout",
    "get_mla_decode_arch",
    "get_mla_decode_fold_sq_factor",
    "select_mla_decode_tilers",
]

_INT32_MAX = 2**31 - 1


# ---------------------------------------------------------------- tile layout and shapes


def compute_q_tile_layout(num_heads: int, seq_len_q: int, m_tile: int) -> tuple[int, int, int]:
    """How the query rows of one request fill tiles of `m_tile` rows.

    Row `token * num_heads + head` of the `num_heads * seq_len_q` rows goes to tile
    `row // m_tile`, so a tile may hold heads of several tokens. (The kernels cut the same number
    of tiles, but spread the rows evenly over them.)

    Returns:
        Rows in all, tiles, and rows of the last tile (1..m_tile).

    Raises:
        ValueError: an argument is not positive, or `num_heads > m_tile`.
    """
    if min(num_heads, seq_len_q, m_tile) <= 0:
        raise ValueError(
            "num_heads, seq_len_q and m_tile: expected positive values, "
            f"got {num_heads}, {seq_len_q} and {m_tile}"
        )
    if num_heads > m_tile:
        raise ValueError(f"num_heads: expected at most m_tile = {m_tile}, got {num_heads}")
    rows = num_heads * seq_len_q
    tiles = -(-rows // m_tile)
    return rows, tiles, rows - (tiles - 1) * m_tile


def get_mla_decode_fold_sq_factor(num_heads: int, seq_len_q: int, mma_m_tile: int = 128) -> int:
    """How many query tokens can share a tile when every tile is to hold equally many.

    The largest divisor of `seq_len_q` whose `num_heads` rows per token fit in `mma_m_tile`;
    1 if there is none or an argument is not positive.
    """
    if min(num_heads, seq_len_q, mma_m_tile) <= 0:
        return 1
    most = min(seq_len_q, mma_m_tile // num_heads)
    return next((fold for fold in range(most, 1, -1) if seq_len_q % fold == 0), 1)


def get_mla_decode_arch(compute_capability: tuple[int, int]) -> str:
    """Architecture name of a compute capability: (9, 0), (10, 0), (10, 3) or (10, 7).

    Raises:
        ValueError: any other capability. This names architectures with kernels of their own; what
            runs where is answered by `kbmla.supported`.
    """
    if compute_capability not in ((9, 0), (10, 0), (10, 3), (10, 7)):
        raise ValueError(
            "compute_capability: expected (9, 0), (10, 0), (10, 3) or (10, 7), "
            f"got {compute_capability}"
        )
    return "sm_{}{}".format(*compute_capability)


def select_mla_decode_tilers(
    num_heads: int,
    seq_len_q: int,
    *,
    is_fp8: bool,
    compute_capability: tuple[int, int],
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(M, N) of the query-key product and of the probability-value product.

    M is 128 query rows, or 64 for FP8 on capability (10, 0) when all `num_heads * seq_len_q` rows
    fit in 64. N is 128 keys of the first product and 256 output columns of the second.

    Raises:
        ValueError: as `get_mla_decode_arch`.
    """
    get_mla_decode_arch(compute_capability)
    small = is_fp8 and compute_capability == (10, 0) and num_heads * seq_len_q <= 64
    m = 64 if small else 128
    return (m, 128), (m, 256)


# ---------------------------------------------------------------- views of the C walks


class _Tile(ctypes.Structure):
    """kbmla_tile."""

    cta: int
    q_tile: int
    batch: int
    split: int
    is_valid: int
    _fields_ = [(n, ctypes.c_int32) for n in ("cta", "q_tile", "batch", "split", "is_valid")]


class _WorkWalk(ctypes.Structure):
    """kbmla_work_walk; `work` stays NULL here, entries are fetched by torch."""

    work_len: int
    num_requests: int
    cluster_size: int
    num_ctas: int
    linear_idx: int
    _fields_ = [("work", ctypes.c_void_p)] + [
        (n, ctypes.c_int32)
        for n in ("work_len", "num_requests", "cluster_size", "num_ctas", "linear_idx")
    ]


class _StaticWalk(ctypes.Structure):
    """kbmla_static_walk."""

    linear_idx: int
    is_valid: int
    _fields_ = [
        ("is_persistent", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
        ("num_q_tiles", ctypes.c_int32),
        ("cluster_size", ctypes.c_int32),
        ("num_splits", ctypes.c_int32),
        ("num_ctas", ctypes.c_int32),
        ("linear_idx", ctypes.c_int32),
        ("block", ctypes.c_int32 * 3),
        ("is_valid", ctypes.c_int32),
    ]


_Grid = ctypes.c_int32 * 3
_WORK, _STATIC, _TILE = (ctypes.POINTER(t) for t in (_WorkWalk, _StaticWalk, _Tile))
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "kbmla_work_list_index": (ctypes.c_int32, [_WORK]),
    "kbmla_work_list_tile": (None, [_WORK, ctypes.c_int32, _TILE]),
    "kbmla_work_list_advance": (None, [_WORK, ctypes.c_int32]),
    "kbmla_static_size": (ctypes.c_int32, [_STATIC]),
    "kbmla_static_current": (None, [_STATIC, _TILE]),
    "kbmla_static_advance": (None, [_STATIC, ctypes.c_int32]),
    "kbmla_static_grid": (
        None,
        [_STATIC, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32)],
    ),
}
for _name, (_restype, _argtypes) in _SIGNATURES.items():
    _function = getattr(lib, _name)
    _function.restype, _function.argtypes = _restype, _argtypes


def _int32(name: str, value: int, least: int) -> int:
    """`value` as an int within `least`..2**31-1, or an error that names it."""
    number = as_int(name, value)
    if not least <= number <= _INT32_MAX:
        raise ValueError(f"{name}: expected {least}..{_INT32_MAX}, got {number}")
    return number


def _only_none(**compiler_arguments: object) -> None:
    for name, value in compiler_arguments.items():
        if value is not None:
            raise ValueError(f"{name}: expected None, got {type(value).__name__}")


@dataclass(frozen=True)
class WorkTileInfo:
    """One step of a walk.

    Attributes:
        tile_idx: (CTA within its cluster, q tile, request, split).
        is_valid_tile: False at the end of a walk; `tile_idx` then means nothing.
    """

    tile_idx: tuple[int, int, int, int]
    is_valid_tile: bool


def _info(tile: _Tile) -> WorkTileInfo:
    return WorkTileInfo((tile.cta, tile.q_tile, tile.batch, tile.split), bool(tile.is_valid))


class MLAStaticTileSchedulerParams:
    """The problem that a scheduler walks over.

    Args:
        is_persistent: True for a fixed grid whose CTAs take tile after tile, False for one CTA per
            tile.
        problem_shape_b: requests, >= 0.
        problem_shape_s: query tiles per request, >= 1.
        cluster_shape_mnk: CTAs of a cluster along three dimensions, each >= 1.
        split_kv: splits per request, >= 1; a work-list walk does not use it.
        problem_shape_b_fdd, problem_shape_s_fdd, split_kv_fdd, loc, ip: None.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        is_persistent: bool,
        problem_shape_b: int,
        problem_shape_s: int,
        cluster_shape_mnk: tuple[int, int, int],
        split_kv: int,
        *,
        problem_shape_b_fdd: None = None,
        problem_shape_s_fdd: None = None,
        split_kv_fdd: None = None,
        loc: None = None,
        ip: None = None,
    ) -> None:
        _only_none(
            problem_shape_b_fdd=problem_shape_b_fdd,
            problem_shape_s_fdd=problem_shape_s_fdd,
            split_kv_fdd=split_kv_fdd,
            loc=loc,
            ip=ip,
        )
        if len(cluster_shape_mnk) != 3:
            raise ValueError(f"cluster_shape_mnk: expected 3 values, got {cluster_shape_mnk}")
        m, n, k = (_int32("cluster_shape_mnk", x, 1) for x in cluster_shape_mnk)
        self.is_persistent = bool(is_persistent)
        self.problem_shape_b = _int32("problem_shape_b", problem_shape_b, 0)
        self.problem_shape_s = _int32("problem_shape_s", problem_shape_s, 1)
        self.cluster_shape_mnk = (m, n, k)
        self.split_kv = _int32("split_kv", split_kv, 1)

    def _static_walk(
        self,
        linear_idx: int = 0,
        block: tuple[int, int, int] = (0, 0, 0),
        num_ctas: int = 1,
        is_valid: bool = True,
    ) -> _StaticWalk:
        return _StaticWalk(
            self.is_persistent,
            self.problem_shape_b,
            self.problem_shape_s,
            self.cluster_shape_mnk[0],
            self.split_kv,
            num_ctas,
            linear_idx,
            _Grid(*block),
            is_valid,
        )


def split_bounds(tiles: int, count: int, split: int) -> tuple[int, int]:
    """(first, past the last) KV tile of a split of a request of `tiles` tiles in `count` splits.

    `count` is normalised so that no split is empty; a split past it has no tiles.
    """
    found = (ctypes.c_int32 * 3)()
    lib.kbmla_split_range_of(
        _int32("tiles", tiles, 0), _int32("count", count, 0), _int32("split", split, 0), found
    )
    return found[0], found[1]


class _Walk:
    """What both schedulers share: the four verbs in terms of current and advance."""

    def get_current_work(self, *, loc: None = None, ip: None = None) -> WorkTileInfo:
        """The tile the walk stands on."""
        raise NotImplementedError

    def advance_to_next_work(
        self, *, advance_count: int = 1, loc: None = None, ip: None = None
    ) -> None:
        """Steps `advance_count` (>= 0) tiles on."""
        raise NotImplementedError

    def initial_work_tile_info(self, *, loc: None = None, ip: None = None) -> WorkTileInfo:
        """The first tile: that of `get_current_work` before any advance."""
        return self.get_current_work(loc=loc, ip=ip)

    def __iter__(self) -> Iterator[WorkTileInfo]:
        """The valid tiles from here to the end; consumes the walk."""
        info = self.get_current_work()
        while info.is_valid_tile:
            yield info
            self.advance_to_next_work()
            info = self.get_current_work()


class MLAStaticTileScheduler(_Walk):
    """The tiles of one CTA in a grid that gives every request the same number of splits.

    Persistent: the tiles (CTA, q tile, request, split), numbered with the CTA fastest and the split
    slowest, from `current_work_linear_idx` on in steps of the grid's size. Not persistent: the
    one tile at `blk_coord` of a grid shaped (cluster, q tiles * requests, splits). Iterable.

    Args:
        params: the problem.
        current_work_linear_idx: index of this CTA in the grid; used if persistent.
        blk_coord: (x, y, z) of this CTA in the grid; used if not persistent.
        grid_shape: (x, y, z) of the grid, as `get_grid_shape` gives it.
        is_valid: False for a walk without tiles; used if not persistent.
        loc, ip: None.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        params: MLAStaticTileSchedulerParams,
        current_work_linear_idx: int,
        blk_coord: tuple[int, int, int],
        grid_shape: tuple[int, int, int],
        *,
        is_valid: bool = True,
        loc: None = None,
        ip: None = None,
    ) -> None:
        _only_none(loc=loc, ip=ip)
        if len(blk_coord) != 3 or len(grid_shape) != 3:
            raise ValueError(
                f"blk_coord and grid_shape: expected 3 values each, got {blk_coord}, {grid_shape}"
            )
        x, y, z = (_int32("blk_coord", c, 0) for c in blk_coord)
        gx, gy, gz = (_int32("grid_shape", c, 0) for c in grid_shape)
        self.params = params
        self.blk_coord = (x, y, z)
        self.grid_shape = (gx, gy, gz)
        self.num_persistent_sm = _int32("grid_shape", gx * gy * gz, 0)
        self._walk = params._static_walk(
            _int32("current_work_linear_idx", current_work_linear_idx, 0),
            self.blk_coord,
            self.num_persistent_sm,
            is_valid,
        )
        self.num_blocks = int(lib.kbmla_static_size(self._walk))
        if params.is_persistent and self.num_blocks > 0 and self.num_persistent_sm == 0:
            raise ValueError(f"grid_shape: expected at least one CTA, got {self.grid_shape}")

    @property
    def current_work_linear_idx(self) -> int:
        """Number of the current tile in the persistent order."""
        return self._walk.linear_idx

    @property
    def is_valid(self) -> bool:
        """Whether a walk that is not persistent still has its tile."""
        return bool(self._walk.is_valid)

    @staticmethod
    def get_grid_shape(
        params: MLAStaticTileSchedulerParams,
        max_active_clusters: int,
        *,
        loc: None = None,
        ip: None = None,
    ) -> tuple[int, int, int]:
        """The grid to launch for `params`.

        Not persistent: (cluster, q tiles * requests, splits). Persistent: (n, 1, 1), n being the
        CTAs of `max_active_clusters` clusters, or the number of tiles if that is less.
        """
        _only_none(loc=loc, ip=ip)
        m, n, k = params.cluster_shape_mnk
        grid = _Grid()
        lib.kbmla_static_grid(
            params._static_walk(),
            _int32("max_active_clusters", max_active_clusters, 1),
            _int32("cluster_shape_mnk", m * n * k, 1),
            grid,
        )
        return grid[0], grid[1], grid[2]

    def get_current_work(self, *, loc: None = None, ip: None = None) -> WorkTileInfo:
        """The tile the walk stands on."""
        _only_none(loc=loc, ip=ip)
        tile = _Tile()
        lib.kbmla_static_current(self._walk, tile)
        return _info(tile)

    def advance_to_next_work(
        self, *, advance_count: int = 1, loc: None = None, ip: None = None
    ) -> None:
        """Steps `advance_count` (>= 0) tiles on; ends a walk that is not persistent."""
        _only_none(loc=loc, ip=ip)
        lib.kbmla_static_advance(self._walk, _int32("advance_count", advance_count, 0))


class MLAWorkListTileScheduler(_Walk):
    """The tiles of one CTA along a planned work list.

    With clusters of `params.cluster_shape_mnk[0]` CTAs, CTA i belongs to cluster i // cluster,
    which takes that entry of the list and every (grid / cluster)-th after it. An entry is
    `(q_tile * B + request) << 8 | split`, or negative. Valid entries are a prefix of the list and
    at least one wave of negative ones follows, so a walk ends inside the list; one that is led past
    the end of a foreign list ends there. Iterable.

    Args:
        params: the problem; B is its `problem_shape_b`.
        work_list: [list_len] int32 on any device. Read one element at a time: a list on a GPU is
            waited for at every tile.
        current_work_linear_idx: index of this CTA in the grid, >= 0.
        num_ctas: CTAs of the grid, >= 1.

    Raises:
        ValueError: the list is not one-dimensional int32, or a value is out of range.
    """

    def __init__(
        self,
        params: MLAStaticTileSchedulerParams,
        work_list: torch.Tensor,
        current_work_linear_idx: int,
        num_ctas: int,
    ) -> None:
        if not isinstance(work_list, torch.Tensor):
            raise TypeError(f"work_list: expected a tensor, got {type(work_list).__name__}")
        if work_list.dim() != 1 or work_list.dtype != torch.int32:
            raise ValueError(
                "work_list: expected a one-dimensional int32 tensor, "
                f"got {work_list.dtype} of shape {tuple(work_list.shape)}"
            )
        self.params = params
        self.work_list = work_list
        self.num_ctas = _int32("num_ctas", num_ctas, 1)
        self._walk = _WorkWalk(
            None,
            work_list.numel(),
            params.problem_shape_b,
            params.cluster_shape_mnk[0],
            self.num_ctas,
            _int32("current_work_linear_idx", current_work_linear_idx, 0),
        )

    @property
    def current_work_linear_idx(self) -> int:
        """Index of the current step: the CTA's own, plus `num_ctas` for every step made."""
        return self._walk.linear_idx

    def get_current_work(self, *, loc: None = None, ip: None = None) -> WorkTileInfo:
        """The tile the walk stands on."""
        _only_none(loc=loc, ip=ip)
        index = lib.kbmla_work_list_index(self._walk)
        entry = int(self.work_list[index].item()) if index < self._walk.work_len else -1
        tile = _Tile()
        lib.kbmla_work_list_tile(self._walk, entry, tile)
        return _info(tile)

    def advance_to_next_work(
        self, *, advance_count: int = 1, loc: None = None, ip: None = None
    ) -> None:
        """Steps `advance_count` (>= 0) entries of this CTA's cluster on."""
        _only_none(loc=loc, ip=ip)
        lib.kbmla_work_list_advance(self._walk, _int32("advance_count", advance_count, 0))
