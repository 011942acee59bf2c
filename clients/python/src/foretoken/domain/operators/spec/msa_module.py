"""What the block-sparse attention blocks of MiniMax-M3 (MSA) hold besides their attention.

Grouped-query attention over the blocks that an indexer chooses: a head of the indexer for each key
and value head scores one key a token, a block counts as its best token. The last block is always
seen. Source: MiniMax-M3's `sparse_attention_config` and vLLM 0.24, `models/minimax_m3`, 2026.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.operators.spec.sweep import pick
from foretoken.domain.units import Quantity

MSA_DIMS = (
    Dim("num_heads", "query heads on this device"),
    Dim("num_kv_heads", "key and value heads on this device"),
    Dim("head_dim", "features of a head"),
    Dim("hidden", "model features"),
    Dim("index_num_heads", "heads of the indexer on this device"),
    Dim("index_head_dim", "features of an indexer's head"),
    Dim("block_size", "tokens of a block"),
    Dim("topk_blocks", "blocks that a query sees at most"),
)


def swept_heads(quick: bool) -> Iterator[Mapping[str, int]]:
    """Yield the sizes of MiniMax-M3, whole and of a rank of four, or small ones to try."""
    sizes = {"head_dim": 128, "hidden": 6144, "index_head_dim": 128, "block_size": 128}
    if quick:
        sizes = {"head_dim": 32, "hidden": 128, "index_head_dim": 16, "block_size": 16}
    for kv_heads in pick(quick, (2,), (4, 1)):
        heads = {"num_heads": 16 * kv_heads, "num_kv_heads": kv_heads}
        topk_blocks = 4 if quick else 16
        yield {**heads, "index_num_heads": kv_heads, **sizes, "topk_blocks": topk_blocks}


def msa_weights(d: Dims) -> Quantity:
    """Return the weights of the block, each of which every new token passes."""
    heads = 2 * d["num_heads"] + 2 * d["num_kv_heads"]
    indexer = (d["index_num_heads"] + 1) * d["index_head_dim"]
    return d["hidden"] * (heads * d["head_dim"] + indexer)


def scoring_products(d: Dims, pairs: Quantity) -> Quantity:
    """Return the multiply-adds of scoring so many query-key pairs."""
    return pairs * d["index_num_heads"] * d["index_head_dim"]
