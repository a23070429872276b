"""Recurrent and hybrid models of transformers in miniature, with random weights that make their states matter."""

from __future__ import annotations

from typing import Any

import torch
import transformers

transformers.logging.set_verbosity_error()

V = 50
TOKENS: dict[str, Any] = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE = TOKENS | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
BASE |= {"num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
DELTA = BASE | {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4}
DELTA |= {"linear_value_head_dim": 6}
MOE = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
KIMI = BASE | LATENT | MOE | {"linear_num_heads": 2, "linear_head_dim": 4}
SSD = BASE | {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 4}
MAMBA = TOKENS | {"hidden_size": 8, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}
OLD = BASE | {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}

#: Name -> configuration.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3Next": DELTA | MOE | {"shared_expert_intermediate_size": 8},
    "Qwen3_5Text": DELTA,
    "Qwen3_5MoeText": DELTA | MOE | {"shared_expert_intermediate_size": 8},
    "OlmoHybrid": DELTA,
    "KimiLinear": KIMI,
    "BailingHybrid": KIMI,
    "Mamba2": MAMBA | {"num_heads": 4, "head_dim": 4, "n_groups": 2, "chunk_size": 4},
    "Bamba": SSD | {"attn_layer_indices": [1], "layer_types": None},
    "FalconH1": SSD | {"mamba_d_ssm": 32, "head_dim": 8, "layer_types": None},
    "GraniteMoeHybrid": SSD | MOE | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 8},
    "NemotronH": BASE
    | {"layers_block_type": ["mamba", "attention"], "layer_types": None, "head_dim": 8, "mamba_num_heads": 4}
    | {"mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4, "chunk_size": 4},
    "Zamba2": BASE
    | {"layers_block_type": ["mamba", "hybrid"], "layer_types": None, "n_mamba_heads": 4, "mamba_ngroups": 2}
    | {"mamba_d_state": 4, "chunk_size": 4, "num_mem_blocks": 1, "adapter_rank": 4},
    "Mamba": MAMBA,
    "FalconMamba": MAMBA,
    "Jamba": OLD | {"attn_layer_period": 2, "attn_layer_offset": 1, "layer_types": None} | MOE,
    "Zamba": OLD | {"num_hidden_layers": 3, "layer_types": None, "n_mamba_heads": 2}
    | {"layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "Rwkv": TOKENS | {"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "context_length": 64},
    "RecurrentGemma": BASE | {"num_hidden_layers": 3, "lru_width": 16, "layer_types": None},
    "MiniMax": BASE | MOE | {"head_dim": 8, "block_size": 4},
    "Lfm2": BASE | {"layer_types": ["conv", "full_attention"], "conv_bias": True},
    "Lfm2Moe": BASE | MOE | {"layer_types": ["conv", "full_attention"]},
    "Lfm3": BASE | {"layer_types": ["conv", "full_attention"]},
    "xLSTM": TOKENS | {"hidden_size": 128, "embedding_dim": 128, "num_hidden_layers": 2, "num_blocks": 2}
    | {"num_heads": 2, "chunk_size": 4},
    "Qwen4ExpText": DELTA | MOE
    | {"layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1}
    | {"indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": 8}
    | {"shared_expert_intermediate_size": 8},
}  # fmt: skip
#: Kinds of the recurrent layers.
KINDS = dict.fromkeys(list(CONFIGS)[:6], "delta rule") | dict.fromkeys(list(CONFIGS)[6:16], "state space")
KINDS |= {"Rwkv": "linear attention", "MiniMax": "linear attention", "xLSTM": "linear attention"}
KINDS |= {"Qwen4ExpText": "delta rule", "RecurrentGemma": "gated recurrence"}
KINDS |= dict.fromkeys(("Lfm2", "Lfm2Moe", "Lfm3"), "convolution")


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with weights drawn anew: those of the configuration are so small that states hardly matter."""
    given = {key: value for key, value in CONFIGS[name].items() if value is not None or key == "q_lora_rank"}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**given))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model.eval().to(dtype)


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, V, (batch, length))
