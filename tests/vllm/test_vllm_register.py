# SPDX-License-Identifier: Apache-2.0
"""The plug-in: what its registration does in vLLM, and what it must not do."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import vllm
import vllm.plugins
from log_lines import log_lines
from tiny_model import write_model
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import kbmla.vllm
from kbmla.vllm import releases

NEW_NAMES = hasattr(AttentionBackendEnum, "register")
NAME = "KBMLA" if NEW_NAMES else "CUSTOM"


def in_fresh_process(code: str) -> str:
    """What `code` prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_entry_point():
    found = entry_points(group="vllm.general_plugins", name="kbmla")
    assert {point.value for point in found} == {"kbmla.vllm:register"}


def test_vllm_loads_it():
    code = (
        "import torch, vllm.plugins;"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as names;"
        "vllm.plugins.load_general_plugins();"
        f"print(names[{NAME!r}].get_path(), torch.cuda.is_initialized())"
    )
    assert in_fresh_process(code) == f"{kbmla.vllm.BACKEND_PATH} False"


def test_imports_nothing_early():
    code = (
        "import sys, kbmla; early = 'kbmla.vllm' in sys.modules;"
        "import kbmla.vllm; print(early, 'vllm' in sys.modules)"
    )
    assert in_fresh_process(code) == "False False"


def test_names_agree_and_calls_repeat():
    kbmla.vllm.register()
    kbmla.vllm.register()
    member = AttentionBackendEnum[NAME]
    backend = member.get_class()
    assert f"{backend.__module__}.{backend.__qualname__}" == kbmla.vllm.BACKEND_PATH
    assert backend.get_name() == member.name == NAME


def test_command_line_takes_the_name(tmp_path):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    kbmla.vllm.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    write_model(tmp_path / "model", 16, layers=1)
    given = parser.parse_args(["--model", str(tmp_path / "model"), "--attention-backend", NAME])
    arguments = EngineArgs.from_cli_args(given)
    assert str(getattr(arguments.attention_backend, "name", arguments.attention_backend)) == NAME


def test_spawned_process_reads_the_name():
    """vLLM's configuration comes pickled to a spawned process, before that one loads plug-ins."""
    import pickle

    kbmla.vllm.register()
    data = pickle.dumps(AttentionBackendEnum[NAME])
    code = f"import pickle; print(pickle.loads({data!r}).name)"
    assert in_fresh_process(code) == NAME


def test_never_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    with log_lines() as lines:
        kbmla.vllm.register()
    assert lines == ["kbmla: the attention backend could not be registered"]


def test_release_without_the_registry_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.2")
    with log_lines() as lines:
        kbmla.vllm.register()
    assert len(lines) == 1
    assert "registered; vLLM: expected a release from 0.26 to 0.33" in lines[0]
    assert lines[0].endswith("got 0.9.2")


@pytest.mark.skipif(NEW_NAMES, reason="this release takes new names")
def test_taken_slot_is_left():
    AttentionBackendEnum.CUSTOM.clear_override()
    register_backend(AttentionBackendEnum.CUSTOM, "other.package.Backend")
    try:
        with log_lines() as lines:
            kbmla.vllm.register()
        assert AttentionBackendEnum.CUSTOM.get_path() == "other.package.Backend"
        assert "CUSTOM is taken by other.package.Backend" in lines[0]
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
        kbmla.vllm.register()


@pytest.mark.parametrize(
    "release", ["0.25.1", "0.34.0", "0.330.0", "1.0.0", "0.1.dev1+g12ab", "dev"]
)
def test_other_releases(release):
    reason = releases.unsupported(release)
    assert reason is not None
    assert "expected a release from 0.26 to 0.33" in reason
    assert reason.endswith(f"got {release}")


@pytest.mark.parametrize(
    "release", ["0.26.0", "0.29.1rc2", "0.33rc1", "0.33.4.dev1+cu130", vllm.__version__]
)
def test_supported_releases(release):
    assert releases.unsupported(release) is None


def test_other_release_is_refused_when_chosen():
    code = (
        "import importlib.metadata as m; m.version = lambda name: '0.25.0';"
        "import kbmla.vllm; kbmla.vllm.register();"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as names\n"
        f"try: names[{NAME!r}].get_class()\n"
        "except RuntimeError as error: print(error)"
    )
    assert in_fresh_process(code).startswith("vLLM: expected a release from 0.26 to 0.33")
