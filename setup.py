# SPDX-License-Identifier: Apache-2.0
"""Builds the extension: the C core through the Makefile, the binding through torch's builder.

The binding targets LibTorch's stable ABI 2.10 and Python's limited API, so one built file serves
later releases of both. An isolated build would fetch a second torch, so it is refused with a hint.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    sys.exit(
        "kbmla: torch >= 2.10 was not found at build time; install it first, then build in that "
        "environment: pip install --no-build-isolation ."
    )


class Build(BuildExtension):  # type: ignore[misc]
    """Makes the core's static library before the binding that links it."""

    def build_extensions(self) -> None:
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(["make", "-s", "-j", jobs, "lib"], cwd=ROOT, check=True)
        flags = (ROOT / "build" / "link-flags").read_text().split()
        for extension in self.extensions:
            extension.extra_link_args += flags
        super().build_extensions()


link_args = []
if platform.system() == "Linux":
    link_args = [
        # The C functions are the package's too (ctypes), not only those the binding calls.
        f"-Wl,--whole-archive,{ROOT / 'build' / 'libkbmla.a'},--no-whole-archive",
        # libtorch pulls in LibTorch's CUDA part where there is one; only there is the stream shim.
        "-Wl,--no-as-needed",
        "-ltorch",
    ]

setup(
    ext_modules=[
        CppExtension(
            "kbmla._C",
            ["csrc/torch/ops.cpp"],
            depends=["csrc/kbmla.h", "build/libkbmla.a"],
            # 0x020a: stable ABI of torch 2.10.
            define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000")],
            extra_compile_args=["-O2", "-g0"],
            extra_link_args=link_args,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": Build.with_options(use_ninja=False)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
