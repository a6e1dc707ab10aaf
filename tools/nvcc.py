#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles one CUDA source for all wanted cards and fails on what a kernel must not have.

    nvcc.py NVCC FOLDER SOURCE OBJECT [flags ...]

FOLDER decides the images: `cuda` (portable) gets those of TORCH_CUDA_ARCH_LIST, by default SM80,
SM90 and PTX that later cards compile; `sm90` gets exactly sm_90a. Fails with one line when nvcc is
older than the sources need or does not know an architecture, and on any spill, stack frame, local
memory or ptxas warning in a kernel. Standard library only: it runs before any environment exists.
"""

import os
import re
import subprocess
import sys

MIN_NVCC = (12, 4)
DEFAULT_ARCHS = "8.0;9.0+PTX"
LEAST_ARCH = 80
PDL_ARCH = 90


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """(major, minor) of the compiler; (0, 0) if it does not say."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return (0, 0)
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def portable_flags(archs: str) -> list[str]:
    """nvcc flags of an arch list in torch's form: "8.0;9.0a", "9.0+PTX", "8.0 9.0". The portable
    kernels use nothing of the "a" and "f" variants, so those are built as the plain card."""
    flags: list[str] = []
    for arch in re.split(r"[;,\s]+", archs.strip()):
        found = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", arch)
        if not found:
            raise ValueError(
                f'TORCH_CUDA_ARCH_LIST: expected items like 8.0 or 9.0+PTX, got "{arch}"'
            )
        number = int(found[1]) * 10 + int(found[2])
        if number < LEAST_ARCH:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST: the kernels need 8.0 or later, got {arch}")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if found[3] and number < PDL_ARCH:
            # Later cards would compile it, and launch kernels early that do not wait.
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: PTX needs 9.0 or later (programmatic launch), got {arch}"
            )
        if found[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return list(dict.fromkeys(flags))


def complaints(log: str) -> list[str]:
    """Lines of ptxas -v output that a build must not have."""
    kernel, found = "?", []
    for line in log.splitlines():
        entry = re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line)
        if entry:
            kernel = f"{entry[1]} ({entry[2]})"
        numbers = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        )
        if numbers and any(int(n) for n in numbers.groups()):
            found.append(f"{kernel}: {line.strip()}")
        # C75xx: wgmma that waits for each instruction, which ptxas calls information.
        if re.search(r"\bwarning\b|\d+ bytes lmem|\(C75\d\d\)", line, re.IGNORECASE):
            found.append(f"{kernel}: {line.strip()}")
    return found


def main() -> int:
    nvcc, folder, source, target, *flags = sys.argv[1:]
    version = nvcc_version(nvcc)
    if version < MIN_NVCC:
        need = ".".join(map(str, MIN_NVCC))
        got = ".".join(map(str, version))
        print(
            f"kbmla: the CUDA sources need nvcc {need} or later, {nvcc} is {got}", file=sys.stderr
        )
        return 1
    try:
        if folder == "sm90":
            images = ["-gencode=arch=compute_90a,code=sm_90a"]
        else:
            images = portable_flags(os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHS)
    except ValueError as error:
        print(f"kbmla: {error}", file=sys.stderr)
        return 1
    command = [nvcc, *flags, *images, "-Xptxas", "-v", "-c", source, "-o", target]
    run = subprocess.run(command, capture_output=True, text=True)
    log = run.stdout + run.stderr
    if run.returncode != 0:
        unknown = re.search(r"Unsupported gpu architecture '(\S+)'", log)
        if unknown:
            print(
                f"kbmla: nvcc {version[0]}.{version[1]} does not know {unknown[1]}; choose other "
                "cards in TORCH_CUDA_ARCH_LIST",
                file=sys.stderr,
            )
        else:
            print(log, file=sys.stderr)
        return run.returncode
    bad = complaints(log)
    for line in bad:
        print(f"kbmla: {source}: {line}", file=sys.stderr)
    if bad:
        os.remove(target)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
