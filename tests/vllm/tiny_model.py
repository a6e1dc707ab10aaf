# SPDX-License-Identifier: Apache-2.0
"""Writes small random checkpoints of DeepSeek-V3's shape that vLLM loads: dense MLPs, true MLA
dimensions (512 + 64), any number of heads and head dimensions before absorption.

The output head prefers, after token t, the token `successor(t)`: it walks cycles of CYCLE tokens.
So greedy continuations repeat, as n-gram speculation needs, and backends agree on them, while the
log-probabilities still move with every layer's attention. The drafter that a model may bring
(multi-token prediction, one layer) prefers the same token, not always.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

VOCABULARY = 2048
FIRST_TOKEN = 2  # 0 and 1 begin and end a text
CYCLE = 6  # divides the tokens from FIRST_TOKEN on
DRAFT_NOISE = 2.5  # of the drafter: more than half of its drafts are right, not all


def successor(token: int) -> int:
    """The token that the model prefers after `token`."""
    place = (token - FIRST_TOKEN) % CYCLE
    return token - place + (place + 1) % CYCLE


def write_tokenizer(path: Path) -> None:
    """A word-level tokenizer of the words t0, t1, ..., for servers that want one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t1"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(
    path: Path | str,
    heads: int,
    layers: int = 3,
    hidden: int = 512,
    seed: int = 0,
    distinct: int | None = None,
    drafter: bool = False,
    nope: int = 128,
    value: int = 128,
) -> None:
    """Writes config.json and model.safetensors of `heads` query heads to the new folder `path`.
    Layers from `distinct` on repeat the earlier ones, since drawing them takes most of the time.
    `drafter` adds one layer of multi-token prediction; the model's own weights are the same.
    `nope` and `value`: dimensions of a head without rotation and of its value, as DeepSeek V3 has
    them; GLM-4.7-Flash has 192 and 256."""
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True)
    inner = 2 * hidden
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers + 1,  # no layer has experts, nor has the drafter
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": 64,
        "v_head_dim": value,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "num_nextn_predict_layers": int(drafter),
        "moe_intermediate_size": 256,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))

    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

    embedding = normal(VOCABULARY, hidden, hidden**0.5)
    # Row u of the head looks along the embedding of the token that u follows.
    head = normal(VOCABULARY, hidden, 0.5)
    for token in range(FIRST_TOKEN, VOCABULARY):
        head[successor(token)] += embedding[token] * (8.0 / hidden)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
    }

    def draw_layer() -> dict[str, torch.Tensor]:
        return {
            "input_layernorm.weight": torch.ones(hidden),
            "post_attention_layernorm.weight": torch.ones(hidden),
            "self_attn.q_proj.weight": normal(heads * (nope + 64), hidden, 1.5),
            "self_attn.kv_a_proj_with_mqa.weight": normal(576, hidden),
            "self_attn.kv_a_layernorm.weight": torch.ones(512),
            "self_attn.kv_b_proj.weight": normal(heads * (nope + value), 512),
            "self_attn.o_proj.weight": normal(hidden, heads * value, 2.0),
            "mlp.gate_proj.weight": normal(inner, hidden),
            "mlp.up_proj.weight": normal(inner, hidden),
            "mlp.down_proj.weight": normal(hidden, inner, 0.5),
        }

    drawn = [draw_layer() for _ in range(layers if distinct is None else min(layers, distinct))]
    stack = [drawn[layer % len(drawn)] for layer in range(layers)]
    if drafter:
        # The layer after the last. From the embedding of the newest token it goes on as the model
        # does; the model's hidden state is noise to it, loud enough that some drafts are wrong.
        pass_on = torch.cat([torch.eye(hidden), normal(hidden, hidden, DRAFT_NOISE)], 1)
        stack.append(
            draw_layer()
            | {
                "enorm.weight": torch.ones(hidden),
                "hnorm.weight": torch.ones(hidden),
                "eh_proj.weight": pass_on,
                # Copies of the model's, as checkpoints of DeepSeek V3 have them.
                "embed_tokens.weight": embedding.clone(),
                "shared_head.norm.weight": torch.ones(hidden),
                "shared_head.head.weight": head.clone(),
            }
        )
    for layer, weights in enumerate(stack):
        for name, tensor in weights.items():
            tensors[f"model.layers.{layer}.{name}"] = tensor
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        str(path / "model.safetensors"),
        metadata={"format": "pt"},
    )
