# SPDX-License-Identifier: Apache-2.0
"""Loads the built extension: importing it registers the ops, ctypes reaches the pure C functions.

Only functions on plain numbers go through ctypes (sizes, scheduler walks, names); everything that
takes a tensor is an op, see ops.py.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from ._version import __version__

MIN_TORCH = (2, 10)


def _load() -> ctypes.CDLL:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < MIN_TORCH:
        raise ImportError(f"kbmla {__version__} needs torch >= 2.10, found {torch.__version__}")
    try:
        from . import _C  # type: ignore[attr-defined]
    except ImportError as error:
        raise ImportError(
            f"kbmla {__version__}: the extension kbmla._C did not load under torch "
            f"{torch.__version__} ({error}). It is built for torch >= 2.10; build it in this "
            "environment with: pip install --no-build-isolation ."
        ) from error
    return ctypes.CDLL(_C.__file__)


lib = _load()


class _Error(ctypes.Structure):
    _fields_ = (
        ("status", ctypes.c_int),
        ("cuda_code", ctypes.c_int32),
        ("text", ctypes.c_char * 192),
    )


class _Config(ctypes.Structure):
    """kbmla_config of csrc/kbmla.h."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_int32) for name in (
            "num_heads", "q_len", "max_requests", "num_clusters", "capacity", "min_split_tokens",
            "policy", "backend", "causal", "partial_fp16", "reducer_d_tiles",
        )),
        ("p_scale", ctypes.c_float),
    )  # fmt: skip


class _Sizes(ctypes.Structure):
    """kbmla_sizes of csrc/kbmla.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "rows", "num_q_tiles", "q_tile_rows", "max_extra", "list_len", "max_partials",
        )),
        ("partial_lse_offset", ctypes.c_int64),
        ("workspace_bytes", ctypes.c_int64),
    )  # fmt: skip


lib.kbmla_config_sizes.argtypes = [
    ctypes.POINTER(_Config),
    ctypes.POINTER(_Sizes),
    ctypes.POINTER(_Error),
]
lib.kbmla_config_sizes.restype = ctypes.c_int
lib.kbmla_prepare.argtypes = [
    ctypes.POINTER(_Config),
    ctypes.POINTER(ctypes.c_int32),
    ctypes.POINTER(_Error),
]
lib.kbmla_prepare.restype = ctypes.c_int
lib.kbmla_status_name.argtypes = [ctypes.c_int]
lib.kbmla_cpu_isa.argtypes = []
for _name in ("kbmla_status_name", "kbmla_cpu_isa", "kbmla_built_torch", "kbmla_built_with"):
    getattr(lib, _name).restype = ctypes.c_char_p


class Config(NamedTuple):
    """What one core runs: the fields of kbmla_config after struct_size, in its order."""

    num_heads: int
    q_len: int
    max_requests: int
    num_clusters: int
    capacity: int
    min_split_tokens: int
    policy: int
    backend: int
    causal: int
    partial_fp16: int
    reducer_d_tiles: int
    p_scale: int


class Sizes(NamedTuple):
    """Sizes that follow from a config: kbmla_sizes of csrc/kbmla.h, where each is explained."""

    rows: int
    num_q_tiles: int
    q_tile_rows: int
    max_extra: int
    list_len: int
    max_partials: int
    partial_lse_offset: int
    workspace_bytes: int


# Where C's name of a field is not the argument's.
_PUBLIC_NAMES = {
    "num_heads": "heads",
    "q_len": "q",
    "max_requests": "requests",
    "num_clusters": "clusters",
}


def exception(status: str, text: str) -> Exception:
    """The exception that a status of the C core stands for."""
    if status in ("INVALID_ARGUMENT", "BUFFER_TOO_SMALL"):
        return ValueError(text)
    if status == "UNSUPPORTED":
        return NotImplementedError(text)
    return RuntimeError(text)


def config_sizes(config: Config) -> Sizes:
    """Checks a config and derives its sizes; ValueError or NotImplementedError names the field."""
    for field, number in config._asdict().items():
        if not -(2**31) <= number < 2**31:
            name = _PUBLIC_NAMES.get(field, field)
            raise ValueError(f"{name}: expected a 32-bit integer, got {number}")
    sizes, error = _Sizes(), _Error()
    status = lib.kbmla_config_sizes(
        _Config(ctypes.sizeof(_Config), *config), ctypes.byref(sizes), ctypes.byref(error)
    )
    if status != 0:
        raise exception(lib.kbmla_status_name(status).decode(), error.text.decode())
    return Sizes(*(int(getattr(sizes, field[0])) for field in _Sizes._fields_))


def prepare(config: Config) -> int:
    """Readies the current CUDA device for a config; the number of clusters that fill the device."""
    width, error = ctypes.c_int32(), _Error()
    status = lib.kbmla_prepare(
        _Config(ctypes.sizeof(_Config), *config), ctypes.byref(width), ctypes.byref(error)
    )
    if status != 0:
        raise exception(lib.kbmla_status_name(status).decode(), error.text.decode())
    return width.value


def has_cuda_kernels() -> bool:
    """Whether this build holds CUDA kernels."""
    return b"cuda kernels=yes" in lib.kbmla_built_with()


def build_info() -> dict[str, str]:
    """Versions and flags of this build: package, torch (built against and running), compiler,
    CUDA ("none" when nvcc was not found) and the instruction set the CPU backend runs on."""
    info = {
        "kbmla": __version__,
        "torch": torch.__version__,
        "built against torch": lib.kbmla_built_torch().decode(),
        "cpu isa": lib.kbmla_cpu_isa().decode(),
    }
    for item in lib.kbmla_built_with().decode().split("; "):
        name, _, value = item.partition("=")
        info[name] = value
    return info
