"""The indexer of sparse attention: light heads that score keys so that attention sees the best.

Its queries come from the compressed query, its one key a token and the weight of each of its heads
from the hidden state. Layers that see what another layer's indexer chose have none: no heads.
Source: DeepSeek-V3.2-Exp, section 2.1, 2025; `index_topk_freq` of GLM-5.2's configuration.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims
from foretoken.domain.units import Quantity

INDEXER_DIMS = (
    Dim("index_num_heads", "heads of the indexer, 0 without one; every device has all", minimum=0),
    Dim("index_head_dim", "features of an indexer's head, 0 without one", minimum=0),
    Dim("index_topk", "keys that a query sees at most, 0 for all", minimum=0),
)
# DeepSeek-V3.2's, and a small one to try.
_FULL_INDEXER = {"index_num_heads": 64, "index_head_dim": 128, "index_topk": 2048}
_QUICK_INDEXER = {"index_num_heads": 4, "index_head_dim": 16, "index_topk": 64}

# Products of queries, keys and weights, what quantises before that of queries, the norm of keys,
# the rotation, of queries and keys each a mixing and a format; the write, the scores, the choice.
# Source: SGLang 0.5.9, srt/layers/attention/nsa/nsa_indexer.py.
LAUNCHES_OF_INDEXER = 13

# Keys are kept in 8 bit with one fp32 scale. Source: `fp8_mqa_logits` of DeepGEMM.
_KEY_SCALE_BYTES = 4


def swept_indexers(quick: bool) -> Iterator[Mapping[str, int]]:
    """Yield the sizes of an indexer, and of none in a layer that takes another's choice."""
    indexer = _QUICK_INDEXER if quick else _FULL_INDEXER
    yield indexer
    yield {**indexer, "index_num_heads": 0}


def has_indexer(d: Dims) -> Quantity:
    """Return 1 where a layer has an indexer, else 0."""
    return (d["index_num_heads"] > 0) * 1


def query_weights(d: Dims) -> Quantity:
    """Return the weights of the indexer's queries and of the weights of its heads."""
    return d["index_num_heads"] * (d["q_lora_rank"] * d["index_head_dim"] + d["hidden"])


def indexer_weights(d: Dims) -> Quantity:
    """Return all weights that a new token passes in an indexer that has a key for every token."""
    return query_weights(d) + has_indexer(d) * d["hidden"] * d["index_head_dim"]


def scoring_products(d: Dims, pairs: Quantity) -> Quantity:
    """Return the multiply-adds of scoring so many query-key pairs."""
    return pairs * d["index_num_heads"] * d["index_head_dim"]


def index_key_bytes(d: Dims, num_keys: Quantity) -> Quantity:
    """Return the bytes of so many of the indexer's keys."""
    return has_indexer(d) * num_keys * (d["index_head_dim"] + _KEY_SCALE_BYTES)
