# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on kbmla, asked by the OpenAI client and stopped by an interrupt."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

from device_engine import (
    DECODE_GRAPHS,
    LENGTHS,
    backend_name,
    cycle,
    model,
    print_table,
    prompts,
    use_runner,
)
from device_jobs import LOGS
from tiny_model import successor


def serve(arguments: argparse.Namespace) -> bool:
    """The server with the one flag, asked by the OpenAI client, then stopped by an interrupt."""
    import urllib.error
    import urllib.request

    use_runner(arguments.runner)
    path, port = model(16), arguments.port
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", path,
        "--attention-backend", backend_name(), "--kv-cache-dtype", "fp8", "--block-size", "64",
        "--dtype", "bfloat16", "--max-model-len", "16384", "--gpu-memory-utilization", "0.2",
        "--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1",
        "--compilation-config", json.dumps(DECODE_GRAPHS["compilation_config"]),
    ]  # fmt: skip
    LOGS.mkdir(exist_ok=True)
    log = LOGS / "serve.log"
    with open(log, "w") as file:
        server = subprocess.Popen(
            command, start_new_session=True, stdout=file, stderr=subprocess.STDOUT
        )
    rows: list[list[Any]] = []
    try:
        began = time.time()
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"server: expected it to run, it ended with {server.returncode}")
            if time.time() - began > 240:
                raise RuntimeError("server: expected an answer within 240 s")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        rows.append(["starts", "ok", f"{time.time() - began:.0f} s"])
        rows += ask(port)
    except Exception as error:
        traceback.print_exc()
        rows.append(["answers", "FAIL", f"{type(error).__name__}: {error}"[:100]])
    began = time.time()
    if server.poll() is None:
        os.kill(server.pid, signal.SIGINT)
    try:
        code: int | str = server.wait(60)
    except subprocess.TimeoutExpired:
        code = "none within 60 s"
    left = alive(server.pid)
    fine = code in (0, -signal.SIGINT, 130) and not left
    note = f"status {code}, {time.time() - began:.0f} s, {len(left)} processes left"
    rows.append(["stops", "ok" if fine else "FAIL", note])
    if not all(row[1] == "ok" for row in rows):
        print(log.read_text(errors="replace")[-4000:])
    print_table(["server", "", "note"], rows)
    return all(row[1] == "ok" for row in rows)


def alive(group: int) -> list[int]:
    """Processes of the group that still run a second after their leader; they are ended."""
    import psutil

    time.sleep(1)
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.pid)
                process.kill()
    return left


def ask(port: int) -> list[list[Any]]:
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60)
    rows = []
    for length in (24, 700, 9000):
        prompt = prompts(loop=True)[LENGTHS.index(9000)][-length:]
        expected = cycle(successor(prompt[-1]), 16)
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=16, temperature=0, logprobs=1,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        tokens = answer.choices[0].token_ids
        finite = all(
            abs(value) < float("inf") for value in answer.choices[0].logprobs.token_logprobs
        )
        right = sum(a == b for a, b in zip(tokens, expected, strict=True))
        fine = finite and right == 16
        note = f"{right}/16 tokens of the cycle, finite {finite}"
        rows.append([f"answers {length} tokens", "ok" if fine else "FAIL", note])
    return rows
