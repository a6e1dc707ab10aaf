# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.26.0 on kbmla end to end, on one GPU or two. A short table comes last; exit status 1 when
a line of it fails.

    device.py all                               the parts below, dcp where two GPUs are visible
    device.py accuracy [--heads 16 20 64 128]   forced tokens' log-probabilities, to a BF16 cache's
    device.py dcp [--heads 16 64]               the same on two GPUs: TP 2, and TP 2 with DCP 2
        --heads 20 --nope 192 --value 256       either with the heads of GLM-4.7-Flash
    device.py schedules [--number 200]          random arrivals, aborts and preemptions
    device.py speed [--heads 64]                output tokens per second, attention time per step
    device.py serve                             `vllm serve` and the OpenAI client
        --runner 2                              these three with vLLM's second model runner

pack.sh and unpack.sh bring what is needed to a machine without network. $OUT, if set, gets a JSON
file of each run's numbers.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time

import torch
from device_accuracy import accuracy, dcp
from device_engine import print_table
from device_schedules import schedules
from device_serve import serve
from device_speed import BESIDE, speed

ALL = [
    "accuracy",
    "accuracy --heads 20 --nope 192 --value 256",
    "schedules",
    "schedules --runner 2",
    "speed",
    "speed --runner 2",
    "serve",
    "serve --runner 2",
    "dcp",
]


def run_all(arguments: argparse.Namespace) -> bool:
    """Each part in a process of its own: they change vLLM's classes before they fork engines."""
    rows = []
    for part in ALL:
        if part == "dcp" and torch.cuda.device_count() < 2:
            rows.append([part, "not run, needs two GPUs", "-"])
            continue
        began = time.time()
        process = subprocess.Popen([sys.executable, __file__, *part.split()])
        try:
            status = process.wait()
        finally:
            process.terminate()
        rows.append([part, "FAIL" if status else "ok", f"{time.time() - began:.0f}"])
    print_table(["part", "", "seconds"], rows)
    return all(row[1] != "FAIL" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parts = parser.add_subparsers(required=True)
    parts.add_parser("all").set_defaults(run=run_all)
    for function, heads in ((accuracy, [16, 20, 64, 128]), (dcp, [16, 64]), (speed, [64])):
        part = parts.add_parser(function.__name__)
        part.add_argument("--heads", type=int, nargs="+", default=heads)
        if function is not speed:
            part.add_argument("--jobs", type=int, default=12, help="engines at once")
            part.add_argument("--only", default="", help="kbmla's runs whose name matches this")
            part.add_argument("--nope", type=int, default=128, help="dimensions without rotation")
            part.add_argument("--value", type=int, default=128, help="dimensions of a value")
            # The comparison that many draws are for is the same in both parts.
            draws = 12 if function is accuracy else 1
            part.add_argument(
                "--draws", type=int, default=draws, help="of forced tokens, beside FLASHMLA"
            )
        part.set_defaults(run=function)
    part.add_argument("--layers", type=int, default=61)
    part.add_argument("--beside", nargs="+", default=BESIDE, choices=BESIDE, help="other backends")
    part = parts.add_parser("schedules")
    part.add_argument("--number", type=int, default=200)
    part.add_argument("--jobs", type=int, default=10, help="engines at once")
    part.set_defaults(run=schedules)
    part = parts.add_parser("serve")
    part.add_argument("--port", type=int, default=8011)
    part.set_defaults(run=serve)
    for name in ("schedules", "speed", "serve"):
        parts.choices[name].add_argument(
            "--runner", type=int, choices=(1, 2), default=1, help="vLLM's model runner"
        )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the engines too
    return 0 if arguments.run(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
