# SPDX-License-Identifier: Apache-2.0
"""A logits processor of vLLM that makes each request emit given tokens, so that runs can be
compared token by token. Log-probabilities that vLLM returns are those of the model, before this."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedTokens(AdapterLogitsProcessor):
    """Forces `SamplingParams.extra_args["forced"]`, a list of token ids, on the request."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        forced = (params.extra_args or {}).get("forced")
        if forced is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            # Beyond the end is a token that async scheduling computes and drops.
            token = forced[min(len(output_ids), len(forced) - 1)]
            kept = logits[token].clone()
            logits.fill_(-torch.inf)
            logits[token] = kept
            return logits

        return force
