"""What the whole latent attention block holds besides its attention: the projections.

Queries and the cache go through a low rank: hidden to q_lora_rank to the heads, hidden to
kv_lora_rank (and the key with position) to the heads; the heads' values go back to hidden.
Source: DeepSeek-V2, section 2.1, 2024.
"""

from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.units import Quantity

MODULE_DIMS = (
    Dim("num_heads", "heads on this device"),
    Dim("hidden", "model features"),
    Dim("q_lora_rank", "features of the compressed query"),
    Dim("kv_lora_rank", "features of the latent vector"),
    Dim("qk_nope_head_dim", "features of a head's key without position"),
    Dim("qk_rope_head_dim", "features of a key with position, shared by the heads"),
    Dim("v_head_dim", "features of a head's value"),
)
# Four products and what quantises before each, two norms, the rotation, the key put together (2),
# the write to the cache and the attention. Source: SGLang 0.5.9, srt/models/deepseek_common/
# attention_forward_methods/forward_mha.py (forward_normal_prepare, forward_normal_core).
LAUNCHES_OF_MLA = 15
# DeepSeek-V3's, and small ones to try.
FULL_WIDTHS = {
    "hidden": 7168,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QUICK_WIDTHS = {
    "hidden": 256,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def token_weights(d: Dims) -> Quantity:
    """Return the weights that every new token passes."""
    down = d["hidden"] * (d["q_lora_rank"] + d["kv_lora_rank"] + d["qk_rope_head_dim"])
    key_dim = d["qk_nope_head_dim"] + d["qk_rope_head_dim"]
    queries = d["q_lora_rank"] * d["num_heads"] * key_dim
    output = d["num_heads"] * d["v_head_dim"] * d["hidden"]
    return down + queries + output


def unpacking_weights(d: Dims) -> Quantity:
    """Return the weights between the latent vector and the heads' keys and values."""
    return d["kv_lora_rank"] * d["num_heads"] * (d["qk_nope_head_dim"] + d["v_head_dim"])


def module_bytes(d: Dims, num_new: Quantity, element_bytes: float) -> Quantity:
    """Return the bytes of the weights, the latent cache and `num_new` tokens in and out."""
    cache = d["kv_tokens"] * (d["kv_lora_rank"] + d["qk_rope_head_dim"])
    elements = token_weights(d) + unpacking_weights(d) + cache + 2 * num_new * d["hidden"]
    return elements * element_bytes
