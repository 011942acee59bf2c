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
COMPRESSED = (
    KindDim("num_heads", "query heads", minimum=1),
    KindDim("head_dim", "features of a head, and of the vector that all share", minimum=1),
    KindDim("qk_rope_head_dim", "features of a head that turn", minimum=1),
    KindDim("q_lora_rank", "rank of the compressed query", minimum=1),
    KindDim("o_lora_rank", "rank of the output of a group of heads", minimum=1),
    KindDim("o_groups", "groups of heads of the output", minimum=1),
    KindDim("window", "tokens that are seen as they are", minimum=1),
    KindDim("compress_ratio", "tokens of a block; 0: the window alone", 0),
)
# Scale of a key of an indexer, which is kept in 8 bits.
INDEX_SCALE_BYTES = 4
# Sums of a block of tokens that is not full, keys and gates, stay in 32 bits.
BLOCK_SUM_BYTES = 2 * 4


def local_heads(num_heads: int, tp: int) -> int:
    """Return the heads of a rank; every rank has one, of few that are repeated."""
    return max(1, num_heads // tp)
