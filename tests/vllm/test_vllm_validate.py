# SPDX-License-Identifier: Apache-2.0
"""What is refused when the engine starts, in the words vLLM prints."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from engine_cpu import cuda_platform, engine_config, make_layer
from vllm.config import set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

import kbmla.vllm
from kbmla.vllm.backend import KbmlaBackend, KbmlaImpl

kbmla.vllm.register()

GOOD = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "fp8",
    "block_size": 64,
    "use_mla": True,
}
CHANGES = [
    ({}, None),
    ({"kv_cache_dtype": "fp8_e4m3"}, None),
    ({"block_size": 128}, None),
    ({"block_size": None}, None),
    ({"dtype": torch.float16}, "dtype not supported"),
    ({"kv_cache_dtype": "auto"}, "kv_cache_dtype not supported"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
    ({"block_size": 16}, "block_size not supported"),
    ({"block_size": 96}, "block_size not supported"),
    ({"head_size": 320}, "head_size not supported"),
    ({"use_mla": False}, "non-MLA not supported"),
    ({"has_sink": True}, "attention sinks not supported"),
    ({"use_sparse": True}, "sparse not supported"),
    ({"has_sliding_window": True}, "sliding window not supported"),
    ({"attn_type": "encoder"}, "attention type encoder not supported"),
    ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
    ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
    ({"use_non_causal": True}, "non-causal attention not supported"),
    ({"use_batch_invariant": True}, "batch invariance not supported"),
    ({"use_pcp": True}, "PCP not supported"),
    ({"use_kv_connector": True}, None),
    ({"use_dcp": True}, None),
    ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
]


def chosen(capability: DeviceCapability, **changes) -> str:
    """vLLM's choice of a backend on a CUDA card, when ours is asked for by name."""

    class Card(cuda_platform()):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return capability

    name = KbmlaBackend.get_name()
    return Card.get_attn_backend_cls(
        AttentionBackendEnum[name], AttentionSelectorConfig(**(GOOD | changes))
    )


@pytest.mark.parametrize(("changes", "reason"), CHANGES, ids=lambda value: str(value)[:40])
def test_configuration(changes, reason):
    missing = changes.keys() - set(AttentionSelectorConfig._fields)
    if missing:
        pytest.skip(f"this release does not ask for {missing.pop()}")
    if reason is None:
        assert chosen(DeviceCapability(9, 0), **changes) == kbmla.vllm.BACKEND_PATH
        return
    with pytest.raises(ValueError, match="not valid for this configuration") as caught:
        chosen(DeviceCapability(9, 0), **changes)
    assert reason in str(caught.value)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cards(capability):
    assert chosen(DeviceCapability(*capability)) == kbmla.vllm.BACKEND_PATH


def test_old_card():
    with pytest.raises(ValueError, match="compute capability not supported"):
        chosen(DeviceCapability(7, 5))


@pytest.mark.parametrize(
    ("heads", "arguments", "reason"),
    [
        (128, {}, None),
        (130, {}, "kbmla: heads: expected 1..128, got 130"),
        (128, {"max_num_seqs": 1025}, "kbmla: requests: expected 1..1024, got 1025"),
        (128, {"drafts": 7}, None),
        (128, {"drafts": 8}, "kbmla: q: expected heads * q <= 1024, got 128 * 9"),
        (20, {"drafts": 50}, None),
    ],
    ids=str,
)
def test_limits_of_a_step(tmp_path, heads, arguments, reason):
    arguments = dict(arguments)
    drafts = arguments.pop("drafts", None)
    if drafts is not None:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": 3,
        }
    config = engine_config(tmp_path, heads, **arguments)
    with set_current_vllm_config(config):
        if reason is None:
            assert chosen(DeviceCapability(9, 0)) == kbmla.vllm.BACKEND_PATH
            return
        with pytest.raises(ValueError, match="not valid for this configuration") as caught:
            chosen(DeviceCapability(9, 0))
    assert reason in str(caught.value)


def test_build_without_cuda_kernels(tmp_path, monkeypatch):
    from kbmla.vllm import backend

    config = engine_config(tmp_path)
    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    with set_current_vllm_config(config):
        monkeypatch.setattr(backend, "has_cuda_kernels", lambda: True)
        assert chosen(DeviceCapability(9, 0)) == kbmla.vllm.BACKEND_PATH
        monkeypatch.setattr(backend, "has_cuda_kernels", lambda: False)
        with pytest.raises(ValueError, match="this build has no CUDA kernels"):
            chosen(DeviceCapability(9, 0))


def make_impl(config, **changes):
    given = {
        "num_heads": 16,
        "head_size": 576,
        "scale": 192**-0.5,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "fp8",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": None,
    }
    with set_current_vllm_config(config):
        return KbmlaImpl(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sliding_window": 128}, "sliding_window: expected None, got 128"),
        ({"alibi_slopes": [0.5]}, "alibi_slopes: expected None"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap: expected None or 0, got 30.0"),
        ({"attn_type": "encoder"}, "attn_type: expected"),
        ({"kv_cache_dtype": "auto"}, "kv_cache_dtype: expected 'fp8' or 'fp8_e4m3', got 'auto'"),
        ({"kv_lora_rank": 448}, "kv_lora_rank: expected 512, got 448"),
        ({"qk_rope_head_dim": 128}, "qk_rope_head_dim: expected 64, got 128"),
        ({"num_heads": 129}, "heads: expected 1..128, got 129"),
        ({"kv_sharing_target_layer_name": "other"}, "KV sharing"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_layer_refusals(tmp_path, changes, text):
    with pytest.raises(NotImplementedError, match=text.replace("(", r"\(")):
        make_impl(engine_config(tmp_path), **changes)


def test_selected_by_a_layer(tmp_path, monkeypatch):
    """vLLM's layer, asking its own selector, gets this backend."""
    import vllm.platforms
    from vllm.v1.attention import selector

    name = KbmlaBackend.get_name()
    config = engine_config(tmp_path, attention_backend=name)
    assert config.attention_config.backend is AttentionBackendEnum[name]
    monkeypatch.setattr(
        type(vllm.platforms.current_platform),
        "get_attn_backend_cls",
        classmethod(lambda cls, backend, *_, **__: backend.get_path()),
    )
    selector._cached_get_attn_backend.cache_clear()
    layer = make_layer(config, None, 16, tmp_path, 192**-0.5)
    assert layer.attn_backend is KbmlaBackend
    assert isinstance(layer.impl, KbmlaImpl)
