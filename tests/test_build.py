# SPDX-License-Identifier: Apache-2.0
"""The build on machines unlike this one: without a GPU, without nvcc, with other standards and job
counts, in isolation. Everything runs in a copy of the sources, so the installed build stays."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import kbmla

ROOT = Path(__file__).resolve().parent.parent


def need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    return found


def run(*command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of what a source distribution holds."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("the sources are not beside the tests")
    copy = tmp_path_factory.mktemp("sources")
    skip = shutil.ignore_patterns("*.so", "__pycache__", "build")
    shutil.copytree(ROOT / "csrc", copy / "csrc", ignore=skip)
    shutil.copytree(ROOT / "kbmla", copy / "kbmla", ignore=skip)
    shutil.copytree(ROOT / "tools", copy / "tools", ignore=skip)
    for name in ("Makefile", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    return copy


def has_cuda_kernels() -> bool:
    return kbmla.build_info()["cuda kernels"] != "none"


def test_43_build_without_a_gpu():
    """pytorch#28955, #66333, fused-ssim#19: whether CUDA is built depends on nvcc, never on a
    visible GPU, and build_info says which it was."""
    assert kbmla.build_info()["cuda kernels"]
    files = [ROOT / "setup.py", ROOT / "Makefile"]
    for file in files:
        if file.exists():
            text = file.read_text()
            assert "cuda.is_available" not in text, file
            assert "get_device_capability" not in text, file
    if not has_cuda_kernels():
        with pytest.raises(NotImplementedError):
            kbmla.BalancedMla(12, torch.device("cuda"), False).require(1, 1)


@pytest.mark.slow
def test_43_core_builds_alone(sources):
    """The C core needs no torch, no Python packages and no nvcc: make and a C compiler."""
    need("make")
    need("gcc")
    bare = {"CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": "", "KBMLA_CUDA": "0"}
    done = run("make", "lib", "-j2", "PYTHON=/nonexistent", "CFLAGS=-O0", cwd=sources, **bare)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no CUDA kernels" in done.stdout
    assert (sources / "build" / "libkbmla.a").stat().st_size > 0


def cuobjdump() -> str:
    """The disassembler's path: from the development environment, else from PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for found in Path(folder).glob("*/bin/cuobjdump"):
            found.chmod(found.stat().st_mode | 0o111)
            return str(found)
    return need("cuobjdump")


def test_43_images():
    """pytorch#28955, #66333: without a GPU and without TORCH_CUDA_ARCH_LIST the build holds images
    of SM80 and SM90, and PTX for later cards."""
    if not has_cuda_kernels():
        pytest.skip("this build has no CUDA kernels")
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        pytest.skip("built for the cards of TORCH_CUDA_ARCH_LIST")
    from kbmla import _lib

    images = run(cuobjdump(), "--list-elf", _lib.lib._name).stdout
    assert "sm_80" in images
    assert "sm_90" in images
    assert "sm_90" in run(cuobjdump(), "--list-ptx", _lib.lib._name).stdout


def compile_cuda(archs: str, tmp_path: Path, nvcc: str | None = None):
    """Compiles the smallest CUDA source for an arch list."""
    target = tmp_path / "launch.o"
    compiler = nvcc or need("nvcc")
    done = run(
        sys.executable, "tools/nvcc.py", compiler, "cuda", "csrc/cuda/cuda_launch.cu", str(target),
        "-std=c++17", "-Icsrc", TORCH_CUDA_ARCH_LIST=archs,
    )  # fmt: skip
    return done, target


@pytest.mark.parametrize(
    ("archs", "images", "ptx"),
    [
        ("9.0", ["sm_90"], []),
        ("9.0a", ["sm_90"], []),  # portable kernels use nothing of the "a" variants
        ("8.0;9.0a", ["sm_80", "sm_90"], []),
        ("9.0+PTX", ["sm_90"], ["sm_90"]),
        ("8.6 10.0a+PTX", ["sm_86", "sm_100"], ["sm_100"]),
    ],
)
def test_44_architectures(tmp_path, archs, images, ptx):
    """FlashMLA#79, #128, cutlass#1874, lmdeploy#3806: TORCH_CUDA_ARCH_LIST in all its forms."""
    done, target = compile_cuda(archs, tmp_path)
    assert done.returncode == 0, done.stderr
    for flag, wanted in (("--list-elf", images), ("--list-ptx", ptx)):
        listed = set(re.findall(r"sm_\d+", run(cuobjdump(), flag, str(target)).stdout))
        assert listed == set(wanted)


@pytest.mark.parametrize("archs", ["7.5", "99.0", "Hopper", "8.6+PTX"])
def test_44_unknown_architecture_is_one_line(tmp_path, archs):
    """xformers#1298: a card the kernels or the compiler do not know stops with one line, and so
    does PTX that lacks what later cards need."""
    done, target = compile_cuda(archs, tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "TORCH_CUDA_ARCH_LIST" in done.stderr
    assert not target.exists()


def test_44_old_nvcc_is_one_line(tmp_path):
    """An nvcc that is too old is named with its version."""
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    old.chmod(0o755)
    done, _ = compile_cuda("9.0", tmp_path, str(old))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "11.8" in done.stderr


def test_spills_fail_the_build():
    """ptxas lines a kernel must not have."""
    sys.path.insert(0, str(ROOT / "tools"))
    import nvcc

    entry = "ptxas info    : Compiling entry function 'k' for 'sm_90'\n"
    clean = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    assert nvcc.complaints(entry + clean) == []
    for bad in (
        "    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n",
        "    0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n",
        "ptxas warning : (C7508) setmaxnreg ignored\n",
    ):
        assert len(nvcc.complaints(entry + bad)) == 1


@pytest.mark.parametrize(("given", "wanted"), [("1", "1"), ("3", "3"), ("", str(os.cpu_count()))])
def test_45_parallel_jobs(sources, tmp_path, given, wanted):
    """flash-attention#2493, flashinfer#3636: MAX_JOBS bounds the jobs of the build; without it they
    are as many as cores."""
    fake = tmp_path / "make"
    fake.write_text('#!/bin/sh\necho "$@" >"$RECORD"\nexit 1\n')
    fake.chmod(0o755)
    record = tmp_path / "record"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run(
        sys.executable, "setup.py", "build_ext", cwd=sources, PATH=path, MAX_JOBS=given,
        RECORD=str(record),
    )  # fmt: skip
    assert done.returncode != 0
    assert record.read_text().split() == ["-s", "-j", wanted, "lib"]


def test_47_isolated_build(sources):
    """pytorch#185698, tensordict#1581, uv#6437: without torch, as in an isolated build, one line
    says what to do instead of a traceback."""
    code = (
        "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['setup.py', '--version']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    done = run(sys.executable, "-c", code, cwd=sources)
    assert done.returncode != 0
    assert "--no-build-isolation" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_47_no_torch_headers_below_the_binding():
    """pytorch#185698: nothing that nvcc or a C compiler sees includes torch."""
    if not (ROOT / "csrc").exists():
        pytest.skip("the sources are not beside the tests")
    for file in (ROOT / "csrc").rglob("*"):
        if file.suffix in (".c", ".h", ".cu", ".cuh") and file.parent.name != "torch":
            assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10|Python)", file.read_text()), (
                file
            )


@pytest.mark.slow
@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_47_binding_in_either_standard(sources, standard):
    """pytorch#185698, exllamav3#360: torch's stable headers and the binding compile as both."""
    import sysconfig

    from torch.utils.cpp_extension import include_paths

    compiler = need("g++")
    done = run(
        compiler,
        "-fsyntax-only",
        f"-std={standard}",
        "-Wall",
        "-DPy_LIMITED_API=0x030a0000",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        *(f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])),
        "csrc/torch/ops.cpp",
        cwd=sources,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("standard", ["c11", "c17"])
def test_47_headers_in_either_standard(sources, standard, tmp_path):
    """The public header compiles alone, as C and as C++."""
    for compiler, std, name in (("gcc", standard, "use.c"), ("g++", "c++17", "use.cpp")):
        use = tmp_path / name
        use.write_text('#include "kbmla.h"\n#include "rules.h"\nint main(void) { return 0; }\n')
        done = run(
            need(compiler), "-fsyntax-only", f"-std={std}", "-Wall", "-Wextra", "-Werror",
            f"-I{sources / 'csrc'}", str(use),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]


def test_sdist_has_the_whole_project(tmp_path):
    """setuptools packs by itself only what Python and the binding name."""
    folders = ("csrc", "kbmla", "tools", "tests", "benchmarks", "examples")
    for folder in folders:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    run(sys.executable, "setup.py", "-q", "sdist", cwd=tmp_path)
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    sources = [
        str(file.relative_to(ROOT))
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and file.suffix not in (".so", ".pyc")
    ]
    missing = {*sources, "Makefile", "README.md", "LICENSE", "setup.py"} - names
    assert not missing
