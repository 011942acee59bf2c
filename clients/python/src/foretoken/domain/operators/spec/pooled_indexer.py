"""What latent attention without positions has whose indexer scores pools of tokens."""

from collections.abc import Callable, Iterator, Mapping

from foretoken.domain.operators.spec.indexer import INDEXER_DIMS, indexer_weights
from foretoken.domain.operators.spec.mla_module import MODULE_DIMS
from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.operators.spec.sweep import pick
from foretoken.domain.units import Quantity

_POSITIONS = "qk_rope_head_dim"
# GLM-5.3-Flash's, and small ones to try.
_FULL_SIZES = {
    "hidden": 4096,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "v_head_dim": 256,
    "index_num_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_pool": 4,
}
_QUICK_SIZES = {
    "hidden": 256,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_num_heads": 4,
    "index_head_dim": 16,
    "index_topk": 64,
    "index_pool": 4,
}


def pooled_dims(batch: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the dimensions of a block: of its batch, of latent attention and of its indexer."""
    return (
        *batch,
        *(dim for dim in MODULE_DIMS if dim.name != _POSITIONS),
        *INDEXER_DIMS,
        Dim("index_pool", "tokens of a key of the indexer"),
    )


def without_positions(d: Dims) -> Dims:
    """Return the dimensions of latent attention whose heads have no part with positions."""
    return {**d, _POSITIONS: 0}


def pooled_weights(d: Dims) -> Quantity:
    """Return the weights of the indexer: its queries' and keys', and those that make pools."""
    return indexer_weights(d) + d["index_head_dim"] * (d["hidden"] + d["index_pool"])


def swept_blocks(
    quick: bool, swept_batches: Callable[[bool, int], Iterator[Mapping[str, int]]]
) -> Iterator[Mapping[str, int]]:
    """Yield the batches that go with a number of keys seen, of a whole model's heads and fewer."""
    sizes = _QUICK_SIZES if quick else _FULL_SIZES
    for num_heads in pick(quick, (8,), (16, 64)):
        for batch in swept_batches(quick, sizes["index_topk"]):
            yield {**batch, "num_heads": num_heads, **sizes}
