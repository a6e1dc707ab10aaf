# SPDX-License-Identifier: Apache-2.0
"""What differs between the supported releases of vLLM, and which those are.

Everything else that kbmla.vllm uses has the same name and meaning in all of them.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from .._version import __version__

OLDEST, NEWEST = (0, 26), (0, 33)


def unsupported(release: str) -> str | None:
    """Why vLLM `release` (such as "0.26.0" or "0.33.1.dev2+cu130") is not supported, or None."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return None
    return (
        f"vLLM: expected a release from {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} with "
        f"kbmla {__version__}, got {release}"
    )


def require_supported() -> None:
    """RuntimeError unless the installed vLLM is supported. No ImportError: vLLM 0.26 prints an
    ImportError's name without its text when it refuses a backend."""
    reason = unsupported(version("vllm"))
    if reason is not None:
        raise RuntimeError(reason)


def backend_name(registry: Any) -> str:
    """Name of the backend in `registry`, vLLM's AttentionBackendEnum: "KBMLA" where it takes new
    members (0.32 and later), else "CUSTOM", the one slot that earlier releases leave open."""
    return "KBMLA" if hasattr(registry, "register") else "CUSTOM"


def max_query_len(vllm_config: Any) -> int:
    """Most query tokens of a request that vLLM counts as decode: 1, or with speculative decoding
    the verified token and its drafts. From 0.31 on vLLM answers itself."""
    from vllm.v1.attention import backend

    if hasattr(backend, "max_decode_query_len"):
        return int(backend.max_decode_query_len(vllm_config))
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.num_speculative_tokens is None:
        return 1
    drafts = int(speculative.num_speculative_tokens)
    # A parallel drafter puts as many mask slots again behind the verified tokens.
    return 1 + (2 * drafts if speculative.parallel_drafting else drafts)
