"""What latent attention without positions has whose indexer scores pools of tokens."""

from foretoken.domain.operators.spec.indexer import INDEXER_DIMS, indexer_weights
from foretoken.domain.operators.spec.mla_module import MODULE_DIMS
from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.units import Quantity

_POSITIONS = "qk_rope_head_dim"


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
