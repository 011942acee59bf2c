"""Sizes of published models that tables name and leave out: those of their attention blocks.

Source: `config.json` of the checkpoints on Hugging Face: deepseek-ai/DeepSeek-V3.2,
deepseek-ai/DeepSeek-V4-Flash and -V4-Pro, zai-org/GLM-5 and -5.2, MiniMaxAI/MiniMax-M3. The same
checkpoint stored in another format has the same sizes.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

Sizes = Mapping[str, int]

# What the names of checkpoints end in that are stored in another format.
_STORED = re.compile(r"-(FP8|NVFP4)$", re.IGNORECASE)

_GLM_5 = {
    "num_heads": 64,
    "hidden": 6144,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_num_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
# Latent attention whose indexer selects tokens (DSA).
DSA_SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "deepseek-v3.2": {
            "num_heads": 128,
            "hidden": 7168,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "index_num_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
        "glm-5": _GLM_5,
        "glm-5.1": _GLM_5,
        "glm-5.2": _GLM_5,
    }
)
# Compressed attention, with the indexer of its layers of ratio 4 (CSA).
COMPRESSED_SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "deepseek-v4-flash": {
            "num_heads": 64,
            "hidden": 4096,
            "q_lora_rank": 1024,
            "head_dim": 512,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "window": 128,
            "index_num_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
        },
        "deepseek-v4-pro": {
            "num_heads": 128,
            "hidden": 7168,
            "q_lora_rank": 1536,
            "head_dim": 512,
            "o_groups": 16,
            "o_lora_rank": 1024,
            "window": 128,
            "index_num_heads": 64,
            "index_head_dim": 128,
            "index_topk": 1024,
        },
    }
)
# Grouped-query attention whose indexer selects blocks (MSA).
MSA_SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "minimax-m3": {
            "num_heads": 64,
            "num_kv_heads": 4,
            "head_dim": 128,
            "hidden": 6144,
            "index_num_heads": 4,
            "index_head_dim": 128,
            "block_size": 128,
            "topk_blocks": 16,
        }
    }
)


def find_sizes(known: Mapping[str, Sizes], checkpoint: str) -> Sizes | None:
    """Return the sizes of a checkpoint by its name on Hugging Face; None if it is not known."""
    name = _STORED.sub("", checkpoint.rpartition("/")[2])
    return known.get(name.lower())
