# SPDX-License-Identifier: Apache-2.0
"""vLLM's whole engine, scheduler to sampler, decoding with kbmla on the CPU, against transformers.

Each run is a process of its own (engine_run.py, example_run.py); engine_ops.py says what stands in
for kernels that a wheel for CUDA does not hold. Whole prompts are prefilled: chunks and prefixes
need a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from tiny_model import successor, write_model, write_tokenizer
from transformers import AutoModelForCausalLM

HEADS, LAYERS = 16, 2
# Mean |difference| of a log-probability from float32: BF16 layers, FP8 cache and query leave 0.018
# to 0.020 here. Errors of the kind that a backend makes are further off: an output 15 % too large
# gives 0.049, one key too few 0.064, a softmax scale of 0.6 times the right one 0.17.
BOUND = 0.03


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "model"
    write_model(path, HEADS, LAYERS, drafter=True)  # which only runs that ask for it load
    write_tokenizer(path)
    return path


def execute(script: str, *arguments: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def run(checkpoint: Path, mode: str, tmp_path: Path) -> dict:
    answer = tmp_path / "answer.json"
    execute("engine_run.py", str(checkpoint), mode, str(answer))
    return json.loads(answer.read_text())


def mean_difference(checkpoint: Path, prompts: list, runs: list) -> float:
    """Mean |log-probability - that of transformers in float32| of all generated tokens."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    differences = []
    for prompt, one in zip(prompts, runs, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([prompt + one["tokens"]])).logits[0].log_softmax(-1)
        places = torch.arange(len(one["tokens"])) + len(prompt) - 1
        truth = scores[places, torch.tensor(one["tokens"])]
        differences.append((torch.tensor(one["lp"]) - truth).abs())
    every = torch.cat(differences)
    assert every.isfinite().all()
    return every.mean().item()


@pytest.mark.parametrize("mode", ["forced", "ngram", "mtp"])
def test_log_probabilities(checkpoint, tmp_path, mode):
    answer = run(checkpoint, mode, tmp_path)
    found = mean_difference(checkpoint, answer["prompts"], answer["runs"])
    print(f"mean |difference| {found:.4f}")
    assert found <= BOUND
    target, *drafter = [one["planned"].keys() for one in answer["builders"]]
    # Each builder plans with a BalancedMla of its own, and all were made with the layers.
    assert [one["mla"] for one in answer["builders"]] == list(range(answer["prepared"]))
    if mode == "forced":
        assert (target, drafter) == ({"1"}, [])
        return
    for prompt, one in zip(answer["prompts"], answer["runs"], strict=True):
        followed = [prompt[-1], *one["tokens"]]
        assert followed[1:] == [successor(token) for token in followed[:-1]]
    assert answer["accepted"] > 0
    if mode == "ngram":
        assert (target, drafter) == ({"4"}, [])
    else:
        assert answer["drafts"] > answer["accepted"]
        # The prompt of three tokens is a decode step too. A drafter reads what was verified, then
        # goes on token by token.
        assert (target, drafter) == ({"3", "4"}, [{"1", "3", "4"}])


def test_head_dimensions_of_glm(tmp_path):
    """Heads of 192 + 64 dimensions and values of 256, which vLLM absorbs as it does DeepSeek's."""
    checkpoint = tmp_path / "model"
    write_model(checkpoint, 20, LAYERS, nope=192, value=256)
    answer = run(checkpoint, "forced", tmp_path)
    found = mean_difference(checkpoint, answer["prompts"], answer["runs"])
    print(f"mean |difference| {found:.4f}")
    assert found <= BOUND


def test_random_schedules(checkpoint, tmp_path):
    counts = run(checkpoint, "schedules", tmp_path)
    assert counts["not finite"] == 0
    assert counts["preempted"] > 0
    assert counts["aborted"] > 0
    assert counts["finished"] + counts["aborted"] == counts["requests"]


def test_offline_example(checkpoint):
    """Both of its engines answer, each with the backend that it names."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kbmla.vllm.releases import backend_name

    settings = ["--requests", "4", "--prompt", "40", "--output", "8"]
    done = execute("example_run.py", str(checkpoint), *settings)
    asked = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("SELECTED")]
    assert asked == ["None", backend_name(AttentionBackendEnum)]
    rows = [line.split() for line in done.stdout.splitlines() if "output tokens/s" in line]
    assert [row[0] for row in rows] == ["default", "kbmla"]
    assert all(float(row[1]) > 0 for row in rows)
    assert rows[0][-1] == "1.00x"
