"""What the compressed attention blocks of DeepSeek-V4 hold besides their attention.

One vector a token is key and value of every head. The last `window` tokens are seen as they are;
of what came before, every `compress_ratio` tokens one entry: all of them (HCA, ratio 128), or those
an indexer chooses (CSA, ratio 4, where entries overlap and so are made of twice as many features).
Without a ratio only the window is seen. The heads' values go back in groups, each with its rank.
Source: DeepSeek-V4's configuration and reference implementation (`inference/model.py`), 2026.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.indexer import INDEXER_DIMS, has_indexer, query_weights
from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.units import Quantity

COMPRESSED_DIMS = (
    Dim("compress_ratio", "tokens of a compressed entry, 0 for a window alone", minimum=0),
    Dim("window", "tokens a query sees as they are, itself included"),
    Dim("num_heads", "heads on this device"),
    Dim("hidden", "model features"),
    Dim("q_lora_rank", "features of the compressed query"),
    Dim("head_dim", "features of a head, and of the vector that is key and value"),
    Dim("o_groups", "groups of heads on this device, each with its own output of low rank"),
    Dim("o_lora_rank", "features of the low-rank output of a group"),
    *INDEXER_DIMS,
)
# A compressor has weights for its entries and as many for how much each token counts in them.
_COMPRESSOR_MATRICES = 2

_FULL_SIZES = {
    "window": 128,
    "num_heads": 64,
    "hidden": 4096,
    "q_lora_rank": 1024,
    "head_dim": 512,
    "o_groups": 8,
    "o_lora_rank": 1024,
}
_QUICK_SIZES = {
    "window": 16,
    "num_heads": 4,
    "hidden": 128,
    "q_lora_rank": 32,
    "head_dim": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
}
_FULL_INDEXER = {"index_num_heads": 64, "index_head_dim": 128, "index_topk": 512}
_QUICK_INDEXER = {"index_num_heads": 4, "index_head_dim": 16, "index_topk": 8}
_NO_INDEXER = {"index_num_heads": 0, "index_head_dim": 0, "index_topk": 0}


def swept_sizes(quick: bool) -> Iterator[Mapping[str, int]]:
    """Yield the sizes of DeepSeek-V4-Flash with each ratio, and of a window alone."""
    sizes, indexer = (_QUICK_SIZES, _QUICK_INDEXER) if quick else (_FULL_SIZES, _FULL_INDEXER)
    yield {"compress_ratio": 4, **sizes, **indexer}
    for ratio in (8 if quick else 128, 0):
        yield {"compress_ratio": ratio, **sizes, **_NO_INDEXER}


def compressed_weights(d: Dims) -> Quantity:
    """Return the weights of the block, each of which every new token passes."""
    queries = d["q_lora_rank"] * (d["hidden"] + d["num_heads"] * d["head_dim"])
    keys = d["hidden"] * d["head_dim"]
    into_groups = d["num_heads"] * d["head_dim"] * d["o_lora_rank"]
    output = d["o_groups"] * d["o_lora_rank"] * d["hidden"]
    return queries + keys + into_groups + output + _compressor_weights(d) + query_weights(d)


def _compressor_weights(d: Dims) -> Quantity:
    has_entries = (d["compress_ratio"] > 0) * 1
    overlap = 1 + has_indexer(d)
    features = has_entries * overlap * d["head_dim"]
    of_indexer = has_indexer(d) * overlap * d["index_head_dim"]
    return _COMPRESSOR_MATRICES * d["hidden"] * (features + of_indexer)
