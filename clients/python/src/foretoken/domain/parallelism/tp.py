"""Tensor parallelism: split the weights of every layer over the ranks of a group.

Column-split GEMMs need no communication forward, row-split ones end in an all-reduce of their
output. With a loss the head's logits stay split, without one they are gathered for the sampler.
In training `lowering/sequence_parallel.py` adds the collectives; under InternEvo's `isp` the ranks
split tokens instead of weights, and heads in the attention alone.
Source: Shoeybi et al., Megatron-LM, 2019.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from foretoken.domain.lowering.communication import axis_group, group_dims
from foretoken.domain.lowering.context_parallel import (
    exchange_heads,
    head_limits,
    key_head_limit,
    sequence_limits,
)
from foretoken.domain.lowering.expert_layer import is_expert_node
from foretoken.domain.lowering.graph import OperatorNode, Partition, RankContext, Section
from foretoken.domain.lowering.options import (
    LayoutCases,
    Lowering,
    Nodes,
    ParallelPass,
)
from foretoken.domain.lowering.sequence_parallel import add_collectives, token_limit
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.kinds.spec.dims import local_heads
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.limit import Limit
from foretoken.domain.units import Quantity, ceil_divide

# What counts the query heads of an operator, alone or times sequences.
_HEAD_DIMS = ("num_heads", "batch", "num_matrices")
# Operators with a row for every query head of a token.
_HEAD_ROWS = ("q_norm", "attn_dropout", "recurrent_norm")
# Heads that ranks hold copies of where there are fewer of them than ranks.
_REPEATED_DIMS = ("num_kv_heads", "index_num_heads")
# What counts the heads of a recurrent state, and the features that lie with them.
_STATE_DIMS = ("num_heads", "num_k_heads", "num_v_heads", "num_groups", "channels")


def _limits(cases: LayoutCases) -> Iterator[Limit]:
    tp, model, training = cases.tp, cases.model, cases.training
    yield from head_limits(cases, tp, cases.is_isp)
    splits_layers = cases.is_isp ^ True
    if training is not None:
        trainer = training.trainer
        yield Limit(
            "heads",
            cases.is_isp & (tp > 1) & (trainer.attention != "flash"),
            lambda: f"{trainer.name} computes attention by whole rows of scores; set tp 1",
        )
        yield token_limit(cases, training)
        yield from sequence_limits(cases, training, cases.is_isp & (tp > 1), is_exchanged=True)
    stack = stack_of(model)
    for num_heads in stack.split_heads:
        yield _head_limit(num_heads, cases, splits_layers)
    for num_heads in sorted({part.dims.get("num_kv_heads", 1) for part in stack.mixers} - {1}):
        yield key_head_limit(model, tp, splits_layers, num_heads)
    for width in sorted(_mlp_widths(cases)):
        yield _width_limit(width, cases, splits_layers)


def _head_limit(num_heads: int, cases: LayoutCases, splits_layers: Quantity) -> Limit:
    return Limit(
        "heads",
        splits_layers & (num_heads % cases.tp != 0),
        lambda: f"{cases.tp} does not divide the {num_heads} heads of {cases.model.name}",
    )


def _width_limit(width: int, cases: LayoutCases, splits_layers: Quantity) -> Limit:
    return Limit(
        "mlp_width",
        splits_layers & (width % cases.tp != 0),
        lambda: f"{cases.tp} does not divide the MLP width {width} of {cases.model.name}",
    )


def _mlp_widths(cases: LayoutCases) -> set[int]:
    # With expert parallelism, and in training, how an expert is split is up to that.
    splits_experts = cases.training is None and cases.ep == 1 and not cases.attention_dp
    widths = set()
    for part in stack_of(cases.model).feed_forwards:
        if splits_experts or part.kind != "experts":
            widths.add(part["intermediate"])
        widths.add(part.dims.get("shared_intermediate", 0))
    return widths - {0}


def _rewrite(nodes: Nodes, lowering: Lowering) -> Nodes:
    rank = lowering.rank
    if rank.layout.tp == 1:
        return nodes
    training = lowering.options.training
    if training is not None:
        if training.weight_parallel == "isp":
            return exchange_heads(nodes, rank, axis_group(rank.layout, "tp"))
        parts = [_split_node(node, rank) for node in nodes]
        return add_collectives(parts, lowering)
    has_loss = any(node.role == "loss" for node in nodes)
    parts = [part for node in nodes for part in _split(node, rank, has_loss)]
    summed = {layer for node in nodes if node.role == "attn_out_proj" for layer in node.layers}
    return tuple(_with_module_sums(parts, rank, summed))


def _with_module_sums(
    nodes: list[OperatorNode], rank: RankContext, summed: set[int]
) -> Iterator[OperatorNode]:
    """Add the sum that ends an attention whose output projection is inside a module.

    `summed` are the layers that have a sum.
    """
    for node in nodes:
        yield node
        if node.role == "input_norm" and summed.isdisjoint(node.layers):
            message_bytes = node.dtype.bytes_of(node.dims["num_tokens"] * rank.model.hidden)
            named = dataclasses.replace(node, role="attn_out_proj")
            yield _collective(named, rank, "all_reduce", message_bytes)


def _split(node: OperatorNode, rank: RankContext, has_loss: bool) -> Iterator[OperatorNode]:
    if node.operator == "moe_experts" and (rank.layout.ep > 1 or rank.has_lock_step):
        yield node
        return
    yield dataclasses.replace(node, dims=_split_dims(node, rank))
    rows = node.dims.get("m", node.dims.get("num_tokens"))
    is_shared_expert = node.role == "shared_down_proj"
    if (
        (node.partition is Partition.ROW and not is_shared_expert)
        or node.operator == "moe_experts"
        or (node.partition is Partition.VOCAB and node.section is Section.EMBEDDING)
    ):
        width = node.dims.get("n", node.dims.get("hidden", rank.model.hidden))
        message_bytes = node.written_dtype.bytes_of(rows * width)
        yield _collective(node, rank, "all_reduce", message_bytes)
    elif node.role == "q_norm_of_all":
        # The squares of queries and of keys, per token in fp32.
        # Source: vLLM 0.18, layers/mamba/linear_attn.py (MiniMaxText01RMSNormTP.forward_qk).
        reduction = _collective(node, rank, "all_reduce", DType.FP32.bytes_of(2 * rows))
        yield dataclasses.replace(reduction, dtype=DType.FP32)
    elif node.role == "loss":
        # The largest logit, the label's and the sum of exponents, per token in fp32.
        # Source: Megatron-LM, vocab_parallel_cross_entropy.
        reduction = _collective(node, rank, "all_reduce", DType.FP32.bytes_of(rows))
        yield dataclasses.replace(reduction, dtype=DType.FP32, repeat=3)
    elif node.role == "lm_head" and not has_loss:
        message_bytes = node.dtype.bytes_of(rows * rank.model.vocab)
        yield _collective(node, rank, "all_gather", message_bytes)


def _split_node(node: OperatorNode, rank: RankContext) -> OperatorNode:
    if is_expert_node(node):
        return node
    return dataclasses.replace(node, dims=_split_dims(node, rank))


def _split_dims(node: OperatorNode, rank: RankContext) -> dict[str, Quantity]:
    tp, dims = rank.layout.tp, dict(node.dims)
    match node.partition:
        case Partition.COLUMN:
            dims["n"] = ceil_divide(dims["n"], tp)
        case Partition.ROW:
            dims["k"] = dims["k"] // tp
        case Partition.QKV:
            num_heads, width = node.kv_heads
            rest = dims["n"] - num_heads * width
            dims["n"] = rest // tp + local_heads(num_heads, tp) * width
        case Partition.HEADS:
            dims = _split_heads(node, tp)
        case Partition.QUERIES:
            name = "batch" if "batch" in dims else "num_heads"
            dims[name] = dims[name] // tp
            dims.update(_repeated(dims, ("o_groups",), tp))
        case Partition.STATES:
            dims.update(_repeated(dims, _STATE_DIMS, tp))
        case Partition.WIDTH:
            name = "intermediate" if "intermediate" in dims else "hidden"
            dims[name] = ceil_divide(dims[name], tp)
        case Partition.VOCAB:
            name = "vocab" if "vocab" in dims else "num_params"
            dims[name] = ceil_divide(dims[name], tp)
    return dims


def _repeated(dims: dict[str, Quantity], names: Sequence[str], tp: int) -> dict[str, Quantity]:
    """Return the heads of a rank, of which there is at least one, by the names that are there."""
    return {name: local_heads(int(dims[name]), tp) for name in names if name in dims}


def _split_heads(node: OperatorNode, tp: int) -> dict[str, Quantity]:
    dims = dict(node.dims)
    dims.update(_repeated(dims, _REPEATED_DIMS, tp))
    for name in _HEAD_DIMS:
        if name in dims:
            dims[name] = dims[name] // tp
    if node.role in _HEAD_ROWS:
        dims["num_tokens"] = dims["num_tokens"] // tp
    if node.role == "k_norm":
        num_heads, _ = node.kv_heads
        dims["num_tokens"] = dims["num_tokens"] // num_heads * local_heads(num_heads, tp)
    return dims


def _collective(
    node: OperatorNode, rank: RankContext, operator: str, message_bytes: Quantity
) -> OperatorNode:
    return OperatorNode(
        role=f"{node.role}_{operator}",
        group="collective",
        section=node.section,
        operator=operator,
        dims={
            "message_bytes": message_bytes,
            **group_dims(rank.layout, "tp", rank.devices_per_node),
        },
        dtype=node.written_dtype,
        **node.placement,
        axis="tp",
    )


PASS = ParallelPass(axis="tp", limits=_limits, rewrite=_rewrite)
