# SPDX-License-Identifier: Apache-2.0
"""One run of vLLM's whole engine on a CPU, decoding with kbmla; for test_vllm_engine.py.

    engine_run.py MODEL MODE ANSWER      MODE: forced, ngram, mtp or schedules

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
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import device_accuracy
import device_engine
import engine_ops
from device_schedules import schedule

import kbmla.vllm
from kbmla.vllm import buffers
from kbmla.vllm.backend import KbmlaBackend, KbmlaMetadataBuilder

device_accuracy.TOKENS = 24

# By builder: which of the BalancedMlas made with the layers it plans with, and its steps by query
# length.
builders: dict[int, dict[str, Any]] = {}


def prepared() -> list[Any]:
    return [mla for shared in buffers._shared.values() for mla in shared.mlas]


def count_plans_by_builder() -> None:
    build = KbmlaMetadataBuilder._build_decode

    def counting(self: Any, **arguments: Any) -> Any:
        metadata = build(self, **arguments)
        # No other is allowed: a builder that made its own would not be found.
        new = {"mla": prepared().index(self.mla), "planned": Counter()}
        builders.setdefault(id(self), new)["planned"][metadata.query_len] += 1
        return metadata

    KbmlaMetadataBuilder._build_decode = counting


def main(path: str, mode: str, answer: str) -> None:
    speculates = mode in ("ngram", "mtp")
    # Short for a CPU; the list is shared with device_accuracy. Long enough for n-grams that every
    # request has drafts in every step, since a step without would prefill from the cache.
    device_engine.LENGTHS[:] = [30, 64, 65, 130, 300] if mode == "ngram" else [3, 17, 64, 130, 300]
    kbmla.vllm.register()
    engine_ops.install(KbmlaBackend)
    count_plans_by_builder()
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
    elif mode == "mtp":
        options |= device_engine.MTP
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
                "prompts": device_engine.prompts(speculates),
                "runs": device_accuracy.generate(llm, "loop" if speculates else "forced"),
                "prepared": len(prepared()),
                "builders": list(builders.values()),
                "drafts": device_engine.metric(llm, "vllm:spec_decode_num_draft_tokens"),
                "accepted": device_engine.metric(llm, "vllm:spec_decode_num_accepted_tokens"),
            }
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
