# SPDX-License-Identifier: Apache-2.0
"""Serves a model offline with vLLM, once with its default attention backend and once with kbmla,
and prints output tokens per second of both.

    python examples/vllm_offline.py MODEL [--requests 32] [--prompt 2048] [--output 128] [...]

MODEL is a checkpoint with multi-head latent attention (DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash)
that fits the GPUs given by --tensor-parallel. Both runs keep an FP8 cache and see the same random
prompts; the rate is over the whole run, prefill included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time


def serve(arguments: argparse.Namespace) -> None:
    """One engine: loads, answers once to warm up and once for the clock, prints its rate."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=arguments.model,
        kv_cache_dtype="fp8",
        block_size=64,
        attention_backend=arguments.backend or None,
        tensor_parallel_size=arguments.tensor_parallel,
        decode_context_parallel_size=arguments.context_parallel,
        max_model_len=arguments.prompt + arguments.output,
        max_num_seqs=arguments.requests,
        trust_remote_code=arguments.trust_remote_code,
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    shape = (2, arguments.requests, arguments.prompt)
    prompts = torch.randint(10, vocabulary, shape, generator=generator).tolist()
    sampling = SamplingParams(temperature=0, max_tokens=arguments.output, ignore_eos=True)
    for batch in prompts:
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], sampling)
        seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print("RATE", json.dumps(tokens / seconds), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens per prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens per answer")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--backend", help=argparse.SUPPRESS)  # set in the runs of one engine
    arguments = parser.parse_args()
    if arguments.backend is not None:
        serve(arguments)
        return 0

    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kbmla.vllm.releases import backend_name

    rates = {}
    for name, backend in (("default", ""), ("kbmla", backend_name(AttentionBackendEnum))):
        # A process each: an engine frees its GPU for certain only when its process ends.
        command = [sys.executable, __file__, *sys.argv[1:], "--backend", backend]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("RATE ")]
        if not found:
            print(done.stdout, file=sys.stderr)
            print(f"{name}: the engine did not answer, status {done.returncode}", file=sys.stderr)
            return 1
        rates[name] = json.loads(found[0].removeprefix("RATE "))
    for name, rate in rates.items():
        print(f"{name:8} {rate:10.1f} output tokens/s  {rate / rates['default']:5.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
