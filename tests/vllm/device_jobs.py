# SPDX-License-Identifier: Apache-2.0
"""Engines of the runs on a GPU side by side: each in a forked process with a log and a time limit.

Most of an engine's start is Python's work and launches, so a card of 139 GiB and 16 cores take a
dozen of the tiny ones at once. They are forked from one process that has imported vLLM, whose own
start is then spent once.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")
LOGS = Path(os.environ.get("KBMLA_VLLM_LOGS", Path(tempfile.gettempdir()) / "kbmla-logs"))
LOG_LINES = 12  # of a failed engine's log, printed


def preload() -> None:
    """Imports what every engine needs, so that forks have it."""
    import torch
    import vllm.entrypoints.llm
    import vllm.model_executor.models.deepseek_mtp
    import vllm.model_executor.models.deepseek_v2
    import vllm.v1.attention.backends.mla.flashmla
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.spec_decode.eagle
    import vllm.v1.spec_decode.ngram_proposer
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_worker  # noqa: F401

    import kbmla.vllm.backend  # noqa: F401

    if torch.cuda.is_initialized():
        raise RuntimeError("torch: expected no CUDA context before engines are forked, got one")


class Job:
    """`work()` in a forked process; its result, or {"error": why}, is in `result` once `over`."""

    def __init__(self, name: str, work: Callable[[], Any], seconds: float) -> None:
        LOGS.mkdir(exist_ok=True)
        self.name, self.result = name, None
        file = "".join(letter if letter.isalnum() else "-" for letter in name)
        self.log, self._answer = LOGS / f"{file}.log", LOGS / f"{file}.json"
        self._answer.unlink(missing_ok=True)
        self.began = time.time()
        self._end = self.began + seconds
        self._seconds = seconds
        sys.stdout.flush()
        self._process = FORK.Process(target=self._run, args=(work,))
        self._process.start()

    def _run(self, work: Callable[[], Any]) -> None:
        os.setsid()  # so that a job is ended with its workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = open(self.log, "w", buffering=1)  # noqa: SIM115  for as long as the process runs
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        status = 1
        try:
            self._answer.write_text(json.dumps(work()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def over(self) -> bool:
        if self.result is not None:
            return True
        late = time.time() > self._end
        if self._process.is_alive() and not late:
            return False
        self.kill()
        if late and not self._answer.exists():
            self.result = {"error": f"no end within {self._seconds:.0f} s"}
        elif self._process.exitcode != 0 or not self._answer.exists():
            self.result = {"error": f"exit status {self._process.exitcode}: {self._last_error()}"}
        else:
            self.result = json.loads(self._answer.read_text())
        failed = isinstance(self.result, dict) and "error" in self.result
        print(
            f"-- {self.name}: {'FAILED' if failed else 'done'} in {time.time() - self.began:.0f} s",
            flush=True,
        )
        if failed:
            lines = self.log.read_text(errors="replace").splitlines()
            print("\n".join(f"   | {line[:240]}" for line in lines[-LOG_LINES:]), flush=True)
        return True

    def kill(self) -> None:
        """Ends the job and what its engine left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()

    def _last_error(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:200] if lines else "nothing in the log"


def run_jobs(
    work: dict[str, Callable[[], Any]],
    at_once: int,
    seconds: float,
    done: Callable[[str, Any], None] = lambda name, result: None,
) -> dict[str, Any]:
    """Results by name, in the order of `work`; each job may take `seconds`. `done` is told of each
    as it ends."""
    waiting, running = list(work.items()), []
    results: dict[str, Any] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, function = waiting.pop(0)
                running.append(Job(name, function, seconds))
            for job in [job for job in running if job.over()]:
                running.remove(job)
                results[job.name] = job.result
                done(job.name, job.result)
            time.sleep(0.1)
    finally:  # interrupted: they are in sessions of their own
        for job in running:
            job.kill()
    return {name: results[name] for name in work}
