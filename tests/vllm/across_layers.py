# SPDX-License-Identifier: Apache-2.0
"""A KV connector of vLLM that transfers nothing and asks for one cache across layers: each page of
a layer is then followed by the same page of the other layers."""

from __future__ import annotations

from typing import Any

from filled_cache import FilledCache


class AcrossLayers(FilledCache):
    """Refuses to run with caches apart, so that a run with it has had the one cache."""

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return True

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        pass

    def register_kv_caches(self, kv_caches: Any) -> None:
        raise RuntimeError("kv_caches: expected one cache across layers, got one for each")

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False
