"""Dimensions that several kinds have, and weights that several are made of."""

from foretoken.domain.models.kinds.spec.kind import KindDim

HEADS = (
    KindDim("num_heads", "query heads", minimum=1),
    KindDim("num_kv_heads", "key and value heads", minimum=1),
    KindDim("head_dim", "features of a query or key head", minimum=1),
)
LATENT = (
    KindDim("num_heads", "query heads", minimum=1),
    KindDim("q_lora_rank", "rank of the compressed query; 0: not compressed", 0),
    KindDim("kv_lora_rank", "rank of the compressed keys and values", minimum=1),
    KindDim("qk_nope_head_dim", "features of a head without position", minimum=1),
    KindDim("qk_rope_head_dim", "features of a head with rotary position", minimum=1),
    KindDim("v_head_dim", "features of a value head", minimum=1),
    KindDim("has_rope", "1: the positional part turns; 0: it does not", 1),
    KindDim(
        "has_gate",
        "gate of the output; 1: of its own projection, 2: of the queries', from both sides of"
        " their norm",
        0,
    ),
)
INDEXER = (
    KindDim("index_heads", "heads of the indexer", minimum=1),
    KindDim("index_head_dim", "features of an indexer's head", minimum=1),
    KindDim("index_topk", "what a query attends to of what the indexer scores", minimum=1),
)


def local_heads(num_heads: int, tp: int) -> int:
    """Return the heads of a rank; every rank has one, of few that are repeated."""
    return max(1, num_heads // tp)
