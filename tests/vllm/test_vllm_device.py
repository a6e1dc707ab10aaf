# SPDX-License-Identifier: Apache-2.0
"""The parts of the runs on a GPU that need none: side-by-side jobs, times, comparisons."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import device
import device_accuracy
import device_jobs
import device_speed
import pytest
import torch


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    monkeypatch.setattr(device_jobs, "LOGS", tmp_path)


def test_jobs_return_what_they_made_and_say_why_they_failed(capfd):
    def fails() -> None:
        raise ValueError("the reason")

    told = []
    results = device_jobs.run_jobs(
        {"a": lambda: {"x": 1}, "b": fails, "c": lambda: [2]},
        2,
        60,
        lambda name, result: told.append(name),
    )
    assert list(results) == ["a", "b", "c"]
    assert results["a"] == {"x": 1}
    assert results["c"] == [2]
    assert results["b"] == {"error": "exit status 1: ValueError: the reason"}
    assert sorted(told) == ["a", "b", "c"]
    assert "   | ValueError: the reason" in capfd.readouterr().out


def test_jobs_end_with_their_processes(tmp_path):
    """A job that is late goes, and with it what it started."""
    seen = tmp_path / "seen"

    def late() -> None:
        loop = f"import time\nwhile True: open({str(seen)!r}, 'a').write('.'); time.sleep(0.05)"
        subprocess.run([sys.executable, "-c", loop])

    results = device_jobs.run_jobs({"late": late}, 1, 2)
    assert results == {"late": {"error": "no end within 2 s"}}
    time.sleep(0.3)
    size = seen.stat().st_size
    time.sleep(0.3)
    assert seen.stat().st_size == size


def test_attention_time_counts_overlap_once():
    kernels = [
        (0.0, 10.0, "nvjet_before"),
        (8.0, 30.0, "void sm90_decode_kernel<64>"),  # starts early, waits for the one before
        (12.0, 34.0, "void cuda_reduce_kernel<1, float>"),  # waits for the decode
        (34.0, 40.0, "nvjet_after"),
        (45.0, 50.0, "void flash::flash_fwd_splitkv_mla_kernel<...>"),
    ]
    assert device_speed.attention_time(kernels) == (34 - 10) + (50 - 45)
    assert device_speed.covered(kernels) == 40 + 5


def run(*log_probabilities: list[float], tokens: list[int] | None = None) -> list[dict]:
    return [{"tokens": tokens or list(range(len(one))), "lp": one} for one in log_probabilities]


def test_difference_ends_at_the_first_other_token():
    reference = run([-1.0, -2.0, -3.0], [-1.0, -1.0])
    other = run([-1.5, -2.0, -9.0], [-1.0, -1.25])
    other[0]["tokens"] = [0, 1, 7]
    assert device_accuracy.difference(other, reference) == (0.75 / 4, 0.5, 4, True)
    left_out = [{"tokens": [], "lp": []}, other[1]]
    assert device_accuracy.difference(left_out, reference) == (0.125, 0.25, 2, True)
    other[1]["lp"][0] = float("nan")
    assert not device_accuracy.difference(other, reference)[3]


def test_excess_takes_a_prompt_as_one_observation():
    reference = run([0.0, 0.0], [0.0, 0.0])
    peer = run([0.1, 0.1], [0.1, 0.1])
    mine = run([0.2, -0.2], [0.1, 0.3])
    more, error = device_accuracy.excess(mine, peer, reference)
    assert more == pytest.approx(0.1)
    assert error == pytest.approx(0.0, abs=1e-12)


def test_forced_prompts_are_those_of_all_draws():
    drawn = {"forced": run([0.0]), "loop": run([1.0]), "draw 1": run([2.0], [3.0])}
    assert [one["lp"] for one in device_accuracy.forced_prompts(drawn)] == [[0.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    ("gpus", "fails", "good"), [(1, "none", True), (2, "serve --runner 2", False)]
)
def test_all_parts(tmp_path, monkeypatch, capfd, gpus, fails, good):
    """One that fails does not keep the others from running."""
    script = tmp_path / "part.py"
    script.write_text(
        f"import sys; print('ran', *sys.argv[1:]); sys.exit(' '.join(sys.argv[1:]) == {fails!r})"
    )
    monkeypatch.setattr(device, "__file__", str(script))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["device.py", "all"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert device.main() == (0 if good else 1)
    lines = capfd.readouterr().out.splitlines()
    ran = [line.removeprefix("ran ") for line in lines if line.startswith("ran ")]
    assert ran == (device.ALL if gpus > 1 else device.ALL[:-1])
    expected = {"dcp": "ok" if gpus > 1 else "not run, needs two GPUs", fails: "FAIL"}
    for part, line in zip(device.ALL, lines[-len(device.ALL) :], strict=True):
        assert line.startswith(part)
        assert line.removeprefix(part).strip().startswith(expected.get(part, "ok"))
