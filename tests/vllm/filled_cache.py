# SPDX-License-Identifier: Apache-2.0
"""A KV connector of vLLM that claims every prompt's cache was computed elsewhere, over a cache that
is full of normal values: decode steps of long requests can be timed without their prefill."""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

PAGES = 256  # filled at a time


class FilledCache(DecodeBenchConnector):
    """vLLM's connector for timing decode, whose own filling puts one constant, 0 in FP8, into every
    page while requests arrive."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for cache in kv_caches.values():
            for pages in cache.split(PAGES):
                values = torch.randn(pages.shape, device=pages.device)
                pages.copy_(values.to(torch.float8_e4m3fn).view(pages.dtype))

    def start_load_kv(self, *_: object, **__: object) -> None:
        pass
