# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by the suite: the device a test runs on, and reproducible randomness.

Every numeric test takes `device` and runs once on the CPU and once on CUDA. The CUDA half is
skipped, with the reason, where torch sees no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch starts OpenMP: threads that wait give their core away instead of spinning. On a
# machine that others use too the suite is more than ten times faster.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import cases
import pytest
import torch
from hypothesis import HealthCheck, settings

from kbmla import core as kbmla_core

# Derandomised: a failure on one machine is the same failure on every other one. The blob that
# hypothesis prints replays the example alone.
settings.register_profile(
    "kbmla",
    derandomize=True,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("kbmla")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        choices=["cuda", "sm90"],
        help="the GPU backend of every core that names none (default: the device's fastest)",
    )


def pytest_configure(config: pytest.Config) -> None:
    backend = config.getoption("--backend")
    cases.prefer_backend(backend)
    if backend and torch.cuda.is_available() and (found := gpu_backend()) != backend:
        raise pytest.UsageError(f"--backend {backend}: this build on this device has {found}")
    for line in (
        "gpu: needs a CUDA device",
        "sm90: needs a Hopper GPU",
        "multi_gpu: needs two CUDA devices",
        "sanitize: short enough to run under compute-sanitizer; captures no graphs",
        "slow: takes more than a few seconds on two cores",
    ):
        config.addinivalue_line("markers", line)


def gpu_backend() -> str:
    """Name of the backend that the GPU tests run on, or why there is none."""
    if not torch.cuda.is_available():
        return "none: torch sees no CUDA device"
    try:
        return cases.backend_on("cuda")
    except NotImplementedError as error:
        return f"none: {error}"


def pytest_report_header() -> str:
    return f"GPU backend: {gpu_backend()}"


def need_cuda(count: int = 1) -> None:
    """Skips unless torch sees `count` CUDA devices."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, torch sees {torch.cuda.device_count()}")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of a test: the CPU always, CUDA where there is one."""
    if request.param == "cuda":
        need_cuda()
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@pytest.fixture
def cpu() -> torch.device:
    """For tests of what only the CPU backend has: threads, instruction sets, fenced memory."""
    return torch.device("cpu")


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """For tests of what only CUDA has: graphs, streams, sync debug mode."""
    need_cuda()
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def sm90(cuda: torch.device) -> torch.device:
    """For tests of backend "sm90", which name it themselves."""
    found = kbmla_core._backends_of(cuda)
    if "sm90" not in found:
        pytest.skip(f"needs backend sm90 (compute capability 9.0), {cuda} has {found}")
    return cuda


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> Iterator[int]:
    """Seeds torch from the test's own name; the seed is in the captured output of a failure."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(request.node.nodeid[-12:])) % 2**31
    torch.manual_seed(seed)
    print(f"torch seed {seed}")
    return seed


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores torch's thread count after a test that changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
