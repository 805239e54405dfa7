"""A small random Qwen4Exp checkpoint, for the demo and for the tests. Needs torch and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# The proportions of the released model (one PLE layer, 2 n-gram orders x 8 heads, shards) at a size that runs
# in seconds on one core. Layer 1 (zero-based) looks up the table: ple_layer_ids counts from one.
TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hc_count": 4,
    "hc_lowrank": 16,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ngram_vocab_size_base": 2000,
    "split_ngram_parts": 4,
    "eos_token_id": 7,
    "max_position_embeddings": 512,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}


def write_random_checkpoint(
    folder: str | Path, *, seed: int = 0, max_shard_size: str = "200KB", **text_config: Any
) -> Path:
    """Write a Qwen4ExpForCausalLM in bfloat16 with random weights to `folder`; keywords override TEXT_CONFIG.

    A freshly initialised model ignores its n-gram table: the weights are small and the convolution behind the
    table is zero. So table and convolution get larger values; then the table decides which token comes next.
    """
    import torch
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**{**TEXT_CONFIG, **text_config}))
        with torch.no_grad():
            for layer in model.model.layers:
                if layer.ple is not None:
                    layer.ple.ple_embedding.ngram_embedding.weight.normal_()
                    layer.ple.conv1d.weight.normal_(std=0.5)
    model.bfloat16().save_pretrained(folder, max_shard_size=max_shard_size)
    for file in Path(folder).glob("*.safetensors"):  # the library writes them for this user alone
        file.chmod((Path(folder) / "config.json").stat().st_mode)
    return Path(folder)
