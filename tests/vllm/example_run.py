# SPDX-License-Identifier: Apache-2.0
"""examples/vllm_offline.py on a CPU, as it stands, for test_vllm_engine.py.

The example starts its engines as processes of its own file; here that is this one, so that each
has the kernels' stand-ins. Eager, since compilation for a CPU takes a minute.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(TESTS))
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
# In one process: one that is spawned would lack the stand-ins.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def install() -> None:
    import engine_ops
    import vllm
    from vllm.platforms.cpu import CpuPlatform

    from kbmla.vllm.backend import KbmlaBackend

    engine_ops.install(KbmlaBackend)
    choose = CpuPlatform.get_attn_backend_cls

    def choosing(cls: type, selected: Any, *arguments: Any, **settings: Any) -> str:
        print("SELECTED", selected and selected.name, file=sys.stderr)
        return choose(selected, *arguments, **settings)

    CpuPlatform.get_attn_backend_cls = classmethod(choosing)
    vllm.LLM = partial(vllm.LLM, enforce_eager=True)


def main() -> int:
    path = TESTS.parent / "examples" / "vllm_offline.py"
    spec = importlib.util.spec_from_file_location("vllm_offline", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.__file__ = __file__
    if "--backend" in sys.argv:  # a process of one engine
        install()
    return example.main()


if __name__ == "__main__":
    sys.exit(main())
