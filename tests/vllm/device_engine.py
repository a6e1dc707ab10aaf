# SPDX-License-Identifier: Apache-2.0
"""Engines, models and prompts of the runs on a GPU, shared by device_*.py."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_model import FIRST_TOKEN, VOCABULARY, successor, write_model, write_tokenizer

HERE = Path(__file__).resolve().parent
# Workers of two GPUs import the logits processor by name.
os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
    VLLM_DISABLE_COMPILE_CACHE="1",  # which engines side by side would share
    VLLM_ALLREDUCE_USE_SYMM_MEM="0",  # two GPUs: over NCCL, without NVLink multicast
)

LENGTHS = [3, 17, 64, 65, 130, 700, 1500, 4000, 9000, 30, 31, 32]
TOKENS = 256
EAGER = {"enforce_eager": True}
SIZES = [1, 2, 4, 8, 16, 32]
DECODE_GRAPHS = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": SIZES,
    }
}
# vLLM's default shape: full graphs of decode steps, pieces around attention in mixed ones.
FULL_GRAPHS = {
    "compilation_config": {
        "mode": 3,
        "backend": "eager",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": SIZES,
    }
}
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
}
# The model's own drafter, an MLA layer that decodes on kbmla too.
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
MIXED = {"enable_prefix_caching": True, "max_num_batched_tokens": 1024}
# Pages of all layers side by side.
ACROSS_LAYERS = {
    "kv_transfer_config": {
        "kv_connector": "AcrossLayers",
        "kv_connector_module_path": "across_layers",
        "kv_role": "kv_both",
    }
}
# Of an engine that shares its card: vLLM's memory profile refuses a card whose free memory grows
# beside it, so the size of the cache is given.
SIDE_BY_SIDE = {"gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 1 << 30}
KBMLA = "kbmla"  # stands for the name that the release takes


def models() -> Path:
    return Path(tempfile.gettempdir()) / "kbmla-models"


def model(heads: int, layers: int = 3, **options: Any) -> str:
    """Folder of a tiny model, written with these options of write_model when it is first asked
    for."""
    name = "-".join(f"{key}{value}" for key, value in sorted(options.items()))
    path = models() / f"heads{heads}-layers{layers}-{name}"
    if not path.exists():
        begun = path.with_suffix(f".{os.getpid()}")
        write_model(begun, heads, layers, distinct=3, **options)
        write_tokenizer(begun)
        with contextlib.suppress(OSError):  # another process was faster
            begun.rename(path)
    return str(path)


def backend_name() -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kbmla.vllm.releases import backend_name

    return backend_name(AttentionBackendEnum)


# Query lengths that kbmla planned in this process, with the number of steps.
planned: Counter[int] = Counter()


def has_mtp(options: dict[str, Any]) -> bool:
    return options.get("speculative_config", {}).get("method") == "mtp"


def use_portable_kernel() -> None:
    """From here on this process decodes as cards other than Hopper do."""
    import functools

    from kbmla import BalancedMla
    from kbmla.vllm import buffers

    buffers.BalancedMla = functools.partial(BalancedMla, backend="cuda")


def use_runner(number: int) -> None:
    """vLLM's first or second model runner, for the engines that follow in this process and its
    children. The second takes neither logits processors nor n-gram drafts."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(number - 1)


def count_plans() -> None:
    from kbmla.vllm.backend import KbmlaMetadataBuilder

    build = KbmlaMetadataBuilder._build_decode

    def counting(self: Any, **arguments: Any) -> Any:
        metadata = build(self, **arguments)
        planned[metadata.query_len] += 1
        return metadata

    KbmlaMetadataBuilder._build_decode = counting


@contextlib.contextmanager
def engine(path: str, backend: str, cache: str, **options: Any) -> Iterator[Any]:
    """An engine in this process (with several GPUs: its workers in others), gone afterwards."""
    ranks = options.get("tensor_parallel_size", 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if ranks == 1 else "1"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    name = backend_name() if backend == KBMLA else backend
    if has_mtp(options):
        drafter = {"attention_backend": name}
        options["speculative_config"] = options["speculative_config"] | drafter
    given = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": cache,
        "block_size": 64,
        "attention_backend": name,
        "max_model_len": 16384,
        "max_num_seqs": 32,
        "num_gpu_blocks_override": 1024,
        "gpu_memory_utilization": 0.2,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
        **options,
    }
    began = time.time()
    llm = LLM(model=path, **given)
    print(f"-- {backend} {cache} loaded in {time.time() - began:.1f} s", flush=True)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def metric(llm: Any, name: str) -> float:
    return sum(one.value for one in llm.get_metrics() if one.name == name)


def save(name: str, content: Any) -> None:
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"{name}.json").write_text(json.dumps(content))


def print_table(head: list[str], rows: list[list[Any]]) -> None:
    cells = [head, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    print()
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def cycle(token: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        tokens.append(token)
        token = successor(token)
    return tokens


def prompts(loop: bool, draw: int = 0) -> list[list[int]]:
    """Random prompts of LENGTHS tokens, others with every `draw`; with `loop`, each ends on a few
    rounds of its cycle, as the model goes on and n-gram speculation expects."""
    generator = torch.Generator().manual_seed(5 + 1000 * draw)
    made = []
    for length in LENGTHS:
        tokens = torch.randint(FIRST_TOKEN, VOCABULARY, (length,), generator=generator).tolist()
        tail = min(length, 24) if loop else 0
        made.append(tokens[: length - tail] + cycle(tokens[0], tail))
    return made


def speculative_graphs(drafts: dict[str, Any] = NGRAM) -> dict[str, Any]:
    """Graphs of verification steps, four query tokens per request, and of a drafter's own."""
    settings = dict(DECODE_GRAPHS["compilation_config"])
    settings["cudagraph_capture_sizes"] = sorted({*SIZES, *(4 * size for size in SIZES)})
    return {"compilation_config": settings, **drafts}
