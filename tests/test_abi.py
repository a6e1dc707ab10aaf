# SPDX-License-Identifier: Apache-2.0
"""What the built extension asks of the machine: symbols, glibc, torch, and nothing at import."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kbmla
from kbmla import _lib

EXTENSION = Path(_lib.lib._name)


def tool(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def fresh(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **env},
        cwd="/",
    )


def test_no_cpp_torch_symbols():
    """xformers#1298, pytorch#152790, flashinfer#911: only the C shims of torch's stable ABI are
    imported; a mangled at:: or c10:: name would bind the file to one torch release."""
    undefined = tool("nm", "-D", "--undefined-only", str(EXTENSION))
    mangled = [x for x in undefined.split() if re.search(r"^_Z.*(2at|3c10|5torch)[0-9N]", x)]
    assert not mangled, mangled
    assert "aoti_torch_" in undefined or "torch_" in undefined


def test_no_python_beyond_the_limited_api():
    """One file serves every Python from 3.10: its name and its symbols are abi3's."""
    assert EXTENSION.name == "_C.abi3.so"
    undefined = tool("nm", "-D", "--undefined-only", str(EXTENSION))
    private = [x for x in undefined.split() if x.startswith("_Py") and x != "_Py_NoneStruct"]
    assert not private, private


def test_glibc():
    """pytorch#185698, exllamav3#360: nothing newer than glibc 2.34 and GLIBCXX 3.4.30."""
    symbols = tool("objdump", "-T", str(EXTENSION))
    for name, limit in (("GLIBC", (2, 34)), ("GLIBCXX", (3, 4, 30)), ("CXXABI", (1, 3, 13))):
        versions = {
            tuple(int(x) for x in v.split("."))
            for v in re.findall(rf"\({name}_([0-9.]+)\)", symbols)
            + re.findall(rf" {name}_([0-9.]+) ", symbols)
        }
        assert all(v <= limit for v in versions), (name, sorted(versions))


def test_needs_no_cuda_library():
    """A machine without a driver imports the package: libcuda is no dependency."""
    needed = re.findall(r"NEEDED.*\[(.*)\]", tool("readelf", "-d", str(EXTENSION)))
    assert not [x for x in needed if x.startswith(("libcuda.", "libcudart", "libtorch_cuda"))]


def test_symbols_resolve():
    """pytorch#152790: loaded with torch's libraries before it, no symbol stays unresolved."""
    code = f"import torch, ctypes, os; ctypes.CDLL({str(EXTENSION)!r}, os.RTLD_NOW)"
    done = fresh(code)
    assert done.returncode == 0, done.stderr


def test_c_functions_are_exported():
    exported = tool("nm", "-D", "--defined-only", str(EXTENSION))
    for name in (
        "kbmla_plan", "kbmla_decode", "kbmla_reduce", "kbmla_config_sizes", "kbmla_config_check",
        "kbmla_status_name", "kbmla_cpu_isa",
    ):  # fmt: skip
        assert re.search(rf" T {name}$", exported, re.MULTILINE), name


def test_import_without_torch_first():
    """flash-attention#1644, flashinfer#911: `import kbmla` finds torch's libraries by itself."""
    done = fresh("import kbmla, sys; assert 'torch' in sys.modules; print(kbmla.__version__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == kbmla.__version__


def test_import_makes_no_cuda_context():
    code = (
        "import kbmla, torch; assert not torch.cuda.is_initialized()\n"
        "assert kbmla.supported(12, 1, 'cpu') and not torch.cuda.is_initialized()\n"
        "kbmla.BalancedMla(12, 'cpu', False).require(1, 4)\n"
        "kbmla.reducer_d_tiles(12, 'cpu'); kbmla.build_info()\n"
        "assert not torch.cuda.is_initialized()"
    )
    done = fresh(code, CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    assert done.returncode == 0, done.stderr


def test_import_is_quiet():
    """No output, and no thread or child process of its own."""
    code = (
        "import torch, os; before = len(os.listdir('/proc/self/task'))\n"
        "import kbmla; assert len(os.listdir('/proc/self/task')) == before"
    )
    done = fresh(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


def test_no_cuda_device(cpu):
    """pytorch#28955: without a GPU the import works, a CUDA device is refused clearly at first use
    and `supported` says no."""
    code = (
        "import kbmla, torch\n"
        "assert kbmla.supported(12, 1, 'cuda') is False\n"
        "try:\n    kbmla.BalancedMla(12, torch.device('cuda'), False).require(1, 1)\n"
        "except (RuntimeError, AssertionError) as e:\n    print(type(e).__name__, e)\n"
    )
    done = fresh(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    # torch's own error where the workspace is made, or ours where the core is.
    assert re.search("cuda|device|NVIDIA", done.stdout, re.IGNORECASE), done.stdout


OLD_TORCH = """
import sys, types
torch = types.ModuleType("torch")
torch.__version__ = {version!r}
sys.modules["torch"] = torch
for name in ("Tensor",):
    setattr(torch, name, object)
try:
    import kbmla
except ImportError as error:
    print(error)
"""


def test_another_torch():
    """xformers#1298, flashinfer#911: a torch too old is refused by an ImportError that names both
    versions, before a symbol can go missing."""
    done = fresh(OLD_TORCH.format(version="2.9.1+cu128"))
    assert done.returncode == 0, done.stderr
    assert "2.9.1+cu128" in done.stdout
    assert "2.10" in done.stdout


def test_extension_missing(tmp_path):
    """A source tree that was never built says so, and how to build."""
    package = tmp_path / "kbmla"
    source = Path(kbmla.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    done = fresh(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        # An editable install would find its own _C for this package too.
        "sys.meta_path[:] = [f for f in sys.meta_path if 'ditable' not in repr(f)]\n"
        "try:\n    import kbmla\nexcept ImportError as e:\n    print(e)"
    )
    assert done.returncode == 0, done.stderr
    assert torch.__version__ in done.stdout
    assert "--no-build-isolation" in done.stdout


def test_build_info():
    info = kbmla.build_info()
    assert info["kbmla"] == kbmla.__version__
    assert info["torch"] == torch.__version__
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in info.items())
    assert {"built against torch", "cpu isa"} <= info.keys()
    assert any("cuda" in k.lower() for k in info), info
    assert info["cpu isa"] in ("generic", "avx2", "avx512")


def test_sizes_of_the_c_structs():
    """ctypes and C agree on the layout: struct_size is checked on the other side."""
    config = _lib._Config(ctypes.sizeof(_lib._Config), 12, 1, 4, 8, 64, 128, 0, 0, 1, 0, 1, 1.0)
    sizes = _lib._Sizes()
    assert _lib.lib.kbmla_config_sizes(ctypes.byref(config), ctypes.byref(sizes), None) == 0
    assert sizes.rows == 12
    assert sizes.list_len > 0
    config.struct_size -= 4
    assert _lib.lib.kbmla_config_sizes(ctypes.byref(config), ctypes.byref(sizes), None) != 0
