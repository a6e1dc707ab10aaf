# SPDX-License-Identifier: Apache-2.0
"""One run of vLLM's whole engine on a CPU, decoding with kbmla; for test_vllm_engine.py.

    engine_run.py MODEL MODE ANSWER      MODE: forced, ngram or schedules

Writes what the run produced to the file ANSWER as JSON. The functions that drive the engine are
those of the runs on a GPU.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import device_accuracy
import device_engine
import engine_ops
from device_schedules import schedule

import kbmla.vllm
from kbmla.vllm.backend import KbmlaBackend

device_accuracy.TOKENS = 24


def main(path: str, mode: str, answer: str) -> None:
    # Short for a CPU; the list is shared with device_accuracy. Long enough under speculation that
    # every request has drafts in every step, since a step without would prefill from the cache.
    device_engine.LENGTHS[:] = [30, 64, 65, 130, 300] if mode == "ngram" else [3, 17, 64, 130, 300]
    kbmla.vllm.register()
    engine_ops.install(KbmlaBackend)
    device_engine.count_plans()
    options = {
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 4096,
        # The prefill that stands in for kernels takes whole prompts.
        "enable_chunked_prefill": False,
        "num_gpu_blocks_override": 200,
        **device_engine.EAGER,
    }
    if mode == "ngram":
        options |= device_engine.NGRAM
    else:
        options["logits_processors"] = ["forced_tokens:ForcedTokens"]
    if mode == "schedules":
        options |= {"num_gpu_blocks_override": 66, "max_num_seqs": 16}  # little more than one needs
    with device_engine.engine(path, device_engine.KBMLA, "fp8", **options) as llm:
        if mode == "schedules":
            counts: Counter[str] = Counter()
            for seed in range(3):
                schedule(llm, random.Random(seed), counts)
            counts["preempted"] = int(device_engine.metric(llm, "vllm:num_preemptions"))
            result: object = counts
        else:
            result = {
                "prompts": device_engine.prompts(mode == "ngram"),
                "runs": device_accuracy.generate(llm, "loop" if mode == "ngram" else "forced"),
                "planned": device_engine.planned,
            }
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
