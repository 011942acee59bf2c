"""Decode context parallelism: ranks of tensor parallelism split the KV cache they hold copies of.

Where ranks have the same key heads, or latent attention's one vector, each keeps every n-th token.
To decode, a rank gathers the queries of all n, attends with them over its own tokens, and adds the
others' results up, weighted by the logarithms of their sums of exponents. A prompt's latent vectors
of earlier tokens are gathered; of grouped heads the queries, as to decode. That an attention over
half the tokens is one kernel, and the correction of its result, take no time of their own.

Where ranks repeat queries instead (Helix), each has the weights that make those of all n, and
results go to the rank of their heads by one all-to-all, with a maximum and a sum for each head.
Source: vLLM 0.19, `v1/attention/ops/common.py` (cp_lse_ag_out_rs),
`v1/attention/backends/mla/common.py` and `config/model.py` (verify_with_parallel_config);
TensorRT-LLM 1.3, `_torch/modules/mla.py` (num_heads_tp, num_heads_tp_cp) and
`docs/source/features/helix.md`; Bhatia et al., Helix Parallelism, 2025.
"""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.communication import PlacedGroup, RankGroup
from foretoken.domain.lowering.expert_layer import larger
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.options import LayoutCases, Lowering, Nodes, ParallelPass
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.limit import Limit
from foretoken.domain.units import Quantity, ceil_divide


def _limits(cases: LayoutCases) -> Iterator[Limit]:
    degree, tp = cases.decode_context_parallel, cases.tp
    if degree == 1:
        return
    yield Limit(
        "heads",
        tp % degree != 0,
        lambda: f"the {degree} ranks that split a context must divide the {tp} ranks of tp",
    )
    for part in stack_of(cases.model).mixers:
        num_heads = 1 if part.kind == "latent" else part.dims.get("num_kv_heads", tp)
        yield Limit(
            "heads",
            degree * num_heads > tp,
            lambda: f"{cases.model.name} has no {degree} copies of a key head over tp {tp}",
        )
        yield Limit(
            "sequence",
            not _is_split(part),
            lambda: f"{cases.model.name} has layers that do not keep all tokens; set it 1",
        )
        yield Limit(
            "heads",
            cases.repeats_queries and part.kind != "latent",
            lambda: f"{cases.model.name} has layers whose queries ranks do not repeat; set it 1",
        )


def _is_split(part: LayerPart) -> bool:
    """Whether a layer keeps all tokens, as vectors or heads."""
    is_whole = part.kind == "attention" and not (part["window"] or part["chunk"])
    return part.kind == "latent" or is_whole


def _rewrite(nodes: Nodes, lowering: Lowering) -> Nodes:
    degree = lowering.options.decode_context_parallel
    if degree == 1:
        return nodes
    repeats = lowering.options.repeats_queries
    if repeats:
        nodes = tuple(_repeated(node, degree) for node in nodes)
    group = PlacedGroup.of_rank(RankGroup(axis="tp", degree=degree), lowering.rank)
    widths = [
        part["kv_lora_rank"] + part["qk_rope_head_dim"]
        for part in stack_of(lowering.rank.model).mixers
        if part.kind == "latent"
    ]
    latent = max(widths, default=0)
    return tuple(part for node in nodes for part in _split(node, group, latent, repeats=repeats))


# What makes the queries of heads, and the keys and values of prompts, by what counts the heads.
_OF_HEADS = {
    "attn_q_proj": "n",
    "attn_kv_proj": "n",
    "attn_rope": "num_heads",
    "mla_query_absorb": "batch",
}


def _repeated(node: OperatorNode, degree: int) -> OperatorNode:
    """Return an operator that makes queries for the heads of all ranks that split a context."""
    if node.role not in _OF_HEADS:
        return node
    name = _OF_HEADS[node.role]
    return dataclasses.replace(node, dims={**node.dims, name: node.dims[name] * degree})


def _split(
    node: OperatorNode, group: PlacedGroup, latent: int, *, repeats: bool
) -> Iterator[OperatorNode]:
    """Yield what becomes of an operator; `latent` is the width of a token's vector, if any."""
    match node.operator:
        case "mla_decode" if repeats:
            yield from _exchanged(_over_own_tokens(node, group.degree), group)
        case "attention_decode" | "mla_decode":
            yield from _between(_over_own_tokens(node, group.degree), group)
        case "attention_prefill":
            heads = node.dims["num_heads"] * group.degree
            gathered = dataclasses.replace(node, dims={**node.dims, "num_heads": heads})
            before, _, *after = _between(gathered, group)
            yield from (before, node, *after)
        case "mla_prefill":
            context = larger(node.dims["kv_tokens"] - node.dims["q_tokens"], 1)
            gathered_bytes = node.written_dtype.bytes_of(context * latent)
            role = f"{node.role}_context_all_gather"
            yield group.collective(node, role, "all_gather", gathered_bytes)
            yield node
        case _:
            yield node


def _over_own_tokens(node: OperatorNode, degree: int) -> OperatorNode:
    """Return the attention of all ranks' heads over the tokens of the rank with most of them."""
    dims = node.dims
    longest = ceil_divide(dims["kv_tokens_max"], degree)
    least = dims["num_seqs"] + longest - 1
    own = {
        "num_heads": dims["num_heads"] * degree,
        "kv_tokens": larger(ceil_divide(dims["kv_tokens"], degree), least),
        "kv_tokens_max": longest,
    }
    return dataclasses.replace(node, dims={**dims, **own})


def _exchanged(node: OperatorNode, group: PlacedGroup) -> Iterator[OperatorNode]:
    """Yield an attention of repeated queries, and what hands its results to their heads' ranks."""
    heads = node.dims["num_seqs"] * node.dims["num_heads"]
    results_bytes = node.written_dtype.bytes_of(heads * node.dims["kv_lora_rank"])
    sums_bytes: Quantity = DType.FP32.bytes_of(2 * heads)
    yield node
    yield group.collective(
        node, f"{node.role}_all_to_all", "all_to_all", results_bytes + sums_bytes
    )


def _between(node: OperatorNode, group: PlacedGroup) -> Iterator[OperatorNode]:
    """Yield an attention of gathered heads between what gathers queries and adds results up."""
    dims = node.dims
    rows = dims["q_tokens"] if "q_tokens" in dims else dims["num_seqs"]
    heads = rows * dims["num_heads"]
    if node.operator == "mla_decode":
        out_width = dims["kv_lora_rank"]
        query_width = out_width + dims["qk_rope_head_dim"]
    else:
        query_width = out_width = dims["head_dim"]
    format_of = node.written_dtype.bytes_of
    role = node.role
    yield group.collective(
        node, f"{role}_query_all_gather", "all_gather", format_of(heads * query_width)
    )
    yield node
    sums_bytes: Quantity = DType.FP32.bytes_of(heads * group.degree)
    yield group.collective(node, f"{role}_sums_all_gather", "all_gather", sums_bytes)
    yield group.collective(
        node, f"{role}_reduce_scatter", "reduce_scatter", format_of(heads * out_width)
    )


PASS = ParallelPass(axis="dcp", limits=_limits, rewrite=_rewrite)
