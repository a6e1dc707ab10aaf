# SPDX-License-Identifier: Apache-2.0
"""kbmla as an attention backend of vLLM: the plug-in's entry point.

Installing kbmla beside vLLM is enough: vLLM calls `register` in each of its processes, and
`--attention-backend KBMLA` (up to vLLM 0.31: `CUSTOM`) with `--kv-cache-dtype fp8 --block-size 64`
selects the backend. `import kbmla` imports nothing of this package, and this module nothing of vLLM
until it is called.
"""

from __future__ import annotations

import logging
from typing import Any

BACKEND_PATH = "kbmla.vllm.backend.KbmlaBackend"

# Below "vllm", so that vLLM's own handlers and level print it.
_log = logging.getLogger("vllm.kbmla")


def register() -> None:
    """Registers the backend with the running vLLM: by its own name where the release takes new
    names, else in the `CUSTOM` slot. Makes no CUDA context, may be called again, and never raises:
    what fails is logged, and vLLM serves with its other backends."""
    try:
        _member()
    except Exception:
        _log.exception("kbmla: the attention backend could not be registered%s", _why())


def _why() -> str:
    """What the release has to do with it, if anything."""
    from importlib.metadata import PackageNotFoundError, version

    from .releases import unsupported

    try:
        reason = unsupported(version("vllm"))
    except PackageNotFoundError:
        return ""
    return f"; {reason}" if reason else ""


def _member() -> Any:
    """The registered member of vLLM's AttentionBackendEnum; registers it where it is missing.

    Pickles of the member name this function, so a process that was spawned and reads vLLM's
    configuration before it loads plug-ins still finds the member.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .releases import backend_name

    name = backend_name(AttentionBackendEnum)
    if name not in AttentionBackendEnum.__members__:
        member = AttentionBackendEnum.register(name, BACKEND_PATH)
        member.__reduce_ex__ = lambda protocol: (_member, ())
        return member
    member = AttentionBackendEnum[name]
    if member.value == BACKEND_PATH:
        return member
    if member.is_overridden() and member.get_path() != BACKEND_PATH:
        _log.warning(
            "kbmla: %s is taken by %s, so kbmla's backend was not registered",
            name,
            member.get_path(),
        )
    else:
        register_backend(member, BACKEND_PATH)
    return member
