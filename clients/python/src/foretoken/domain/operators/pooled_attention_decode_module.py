"""The whole latent attention block of a token per sequence whose indexer scores pools of tokens.

Source: GLM-5.3-Flash's modelling file in transformers 5 (`glm5_next`), 2026.
"""

import dataclasses

from foretoken.domain.operators.dsa_decode_module import SPEC as DSA
from foretoken.domain.operators.dsa_decode_module import swept_batches
from foretoken.domain.operators.pooled_attention_prefill_module import num_weights
from foretoken.domain.operators.spec.indexer import index_key_bytes, scoring_products
from foretoken.domain.operators.spec.mla_module import token_weights, unpacking_weights
from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.operators.spec.pooled_indexer import (
    pooled_dims,
    pooled_weights,
    swept_blocks,
    without_positions,
)
from foretoken.domain.units import Quantity


def _scoring(d: Dims) -> Quantity:
    return scoring_products(d, d["kv_tokens"] // d["index_pool"])


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    whole = without_positions(d)
    attention = d["selected_tokens"] * d["num_heads"] * 2 * d["kv_lora_rank"]
    weights = token_weights(whole) + unpacking_weights(whole) + pooled_weights(d)
    return 2 * (attention + d["num_seqs"] * weights + _scoring(d))


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    cache = d["selected_tokens"] * d["kv_lora_rank"]
    elements = num_weights(d) + cache + 2 * d["num_seqs"] * d["hidden"]
    return elements * element_bytes + index_key_bytes(d, d["kv_tokens"] // d["index_pool"])


_BATCH: tuple[Dim, ...] = DSA.dims[: [dim.name for dim in DSA.dims].index("num_heads")]

SPEC = dataclasses.replace(
    DSA,
    name="pooled_attention_decode_module",
    summary="latent attention block of one token per sequence to pools that an indexer picks",
    dims=pooled_dims(_BATCH),
    flops=_flops,
    moved_bytes=_moved_bytes,
    costs={
        **DSA.costs,
        "weights": lambda d, _: num_weights(d),
        "scoring": lambda d, _: _scoring(d),
    },
    sweep=lambda quick: swept_blocks(quick, swept_batches),
    num_weights=num_weights,
)
