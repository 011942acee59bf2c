"""Configurations of models so small that a step takes milliseconds."""

import json
from collections.abc import Mapping
from typing import Any

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    },
    "qwen3": {
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "qwen2": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": 96,
        "n_positions": 64,
        "activation_function": "gelu_new",
    },
}


def config_json(name: str) -> str:
    """Return the text of a model's `config.json`."""
    return json.dumps(CONFIGS[name])
