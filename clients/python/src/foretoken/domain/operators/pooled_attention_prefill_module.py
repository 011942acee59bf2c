"""The whole latent attention block of new tokens whose indexer scores pools of tokens.

As DSA, without positions, and with a key of the indexer for every pool, which gates make of the
keys of its tokens.
Source: GLM-5.3-Flash's modelling file in transformers 5 (`glm5_next`), 2026.
"""

import dataclasses
from collections.abc import Mapping

from foretoken.domain.operators.dsa_prefill_module import COSTS as DSA_COSTS
from foretoken.domain.operators.dsa_prefill_module import SPEC as DSA
from foretoken.domain.operators.dsa_prefill_module import swept_batches
from foretoken.domain.operators.spec.indexer import index_key_bytes, scoring_products
from foretoken.domain.operators.spec.mla_module import token_weights, unpacking_weights
from foretoken.domain.operators.spec.operator import Dim, Dims, FeatureFormula
from foretoken.domain.operators.spec.pooled_indexer import (
    pooled_dims,
    pooled_weights,
    swept_blocks,
    without_positions,
)
from foretoken.domain.units import Quantity, smaller


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    whole = without_positions(d)
    heads_pairs = d["selected_pairs"] * d["num_heads"]
    latent = heads_pairs * 2 * d["kv_lora_rank"] + d["q_tokens"] * unpacking_weights(whole)
    unpacked = heads_pairs * (d["qk_nope_head_dim"] + d["v_head_dim"])
    unpacked = unpacked + d["kv_tokens"] * unpacking_weights(whole)
    projections = d["q_tokens"] * (token_weights(whole) + pooled_weights(d))
    scoring = scoring_products(d, d["score_pairs"] // d["index_pool"])
    return 2 * (smaller(latent, unpacked) + projections + scoring)


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    # Queries may all choose the same tokens.
    seen = smaller(d["kv_tokens"], d["num_seqs"] * d["index_topk"])
    elements = num_weights(d) + seen * d["kv_lora_rank"] + 2 * d["q_tokens"] * d["hidden"]
    return elements * element_bytes + index_key_bytes(d, d["kv_tokens"] // d["index_pool"])


def num_weights(d: Dims) -> Quantity:
    """Return the weights of the block: of its projections and of its indexer."""
    whole = without_positions(d)
    return token_weights(whole) + unpacking_weights(whole) + pooled_weights(d)


def _scoring(d: Dims, _num_sms: int) -> Quantity:
    return scoring_products(d, d["score_pairs"] // d["index_pool"])


COSTS: Mapping[str, FeatureFormula] = {
    **{
        name: lambda d, num_sms, cost=cost: cost(without_positions(d), num_sms)  # type: ignore[misc]
        for name, cost in DSA_COSTS.items()
    },
    "weights": lambda d, _: num_weights(d),
    "scoring": _scoring,
}
_BATCH: tuple[Dim, ...] = DSA.dims[: [dim.name for dim in DSA.dims].index("num_heads")]

SPEC = dataclasses.replace(
    DSA,
    name="pooled_attention_prefill_module",
    summary="latent attention block of new tokens to pools that an indexer picks",
    dims=pooled_dims(_BATCH),
    flops=_flops,
    moved_bytes=_moved_bytes,
    costs=COSTS,
    sweep=lambda quick: swept_blocks(quick, swept_batches),
    num_weights=num_weights,
)
