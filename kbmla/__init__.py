# SPDX-License-Identifier: Apache-2.0
"""kbmla: KV-balanced decode for multi-head latent attention over a paged FP8 cache."""

from . import core, helpers
from ._lib import build_info
from ._version import __version__
from .balanced import BalancedMla, reducer_d_tiles, supported

__all__ = [
    "BalancedMla",
    "__version__",
    "build_info",
    "core",
    "helpers",
    "reducer_d_tiles",
    "supported",
]
