"""What the layer names of LLMServingSim mean: an operator and its dimensions on one rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.catalog.array import Integers
from foretoken.catalog.importers.llmservingsim.variant import RankDims

DimsOfRows = Callable[[Integers, RankDims], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Layer:
    """An operator, its dimensions for a column of token or sequence counts, and a flag."""

    operator: str
    dims: DimsOfRows
    flag: str = ""


def _gemm(n: Callable[[RankDims], int], k: Callable[[RankDims], int]) -> Layer:
    return Layer("gemm", lambda tokens, rank: {"m": tokens, "n": n(rank), "k": k(rank)})


def _q_width(rank: RankDims) -> int:
    return rank.num_heads * rank.head_dim


def _qkv_width(rank: RankDims) -> int:
    return (rank.num_heads + 2 * rank.num_kv_heads) * rank.head_dim


def _hidden(rank: RankDims) -> int:
    return rank.hidden


def _wide(tokens: Integers, rank: RankDims) -> Mapping[str, Any]:
    return {"num_tokens": tokens, "hidden": rank.hidden}


def _embedding(tokens: Integers, rank: RankDims) -> Mapping[str, Any]:
    return {"num_tokens": tokens, "hidden": rank.hidden, "vocab": rank.vocab}


def _rope(tokens: Integers, rank: RankDims) -> Mapping[str, Any]:
    heads = {"num_heads": rank.num_heads, "num_kv_heads": rank.num_kv_heads}
    return {"num_tokens": tokens, **heads, "head_dim": rank.head_dim}


def _qk_norm(tokens: Integers, rank: RankDims) -> Mapping[str, Any]:
    rows = tokens * (rank.num_heads + rank.num_kv_heads) // 2
    return {"num_tokens": rows, "hidden": rank.head_dim}


def _activation(tokens: Integers, rank: RankDims) -> Mapping[str, Any]:
    return {"num_tokens": tokens, "intermediate": rank.intermediate}


def _sampler(sequences: Integers, rank: RankDims) -> Mapping[str, Any]:
    # Every rank draws from the gathered logits.
    return {"num_seqs": sequences, "vocab": rank.logits}


# The profiler divides a layer's time by its calls, so that unlike calls become their mean: kept,
# under the operator that comes nearest, and flagged.
LAYERS: Mapping[str, Layer] = {
    "embedding": Layer("embedding", _embedding),
    "layernorm": Layer(
        "add_rms_norm",
        _wide,
        "mean_of_calls: of a norm that adds the residual, and of a model's first, which has none",
    ),
    "qkv_proj": _gemm(_qkv_width, _hidden),
    "qk_norm": Layer(
        "rms_norm",
        _qk_norm,
        "mean_of_calls: of the norm of the queries and the norm of the keys",
    ),
    "rotary_emb": Layer("rope", _rope),
    "o_proj": _gemm(_hidden, _q_width),
    "gate_up_proj": _gemm(lambda rank: 2 * rank.intermediate, _hidden),
    "act_fn": Layer("silu_mul", _activation),
    "down_proj": _gemm(_hidden, lambda rank: rank.intermediate),
    # vLLM adds the last residual in the same kernel.
    "final_layernorm": Layer("add_rms_norm", _wide),
    "lm_head": _gemm(lambda rank: rank.vocab, _hidden),
    "sampler": Layer("sampler", _sampler),
}
