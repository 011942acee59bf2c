"""Collectives of tensor parallelism in training, and the tokens each rank has.

Context parallelism gives each rank two pieces of every sequence, one from its first and one from
its second half, so that all have as much causal attention: what a rank sees of itself is a causal
sequence of its own tokens. InternEvo's `isp` splits tokens over the ranks of tp the same way.
Source: Megatron-Core, `get_batch_on_this_cp_rank`.

Without sequence parallelism a row-split GEMM ends in an all-reduce. With it, what works on whole
features has a share of the tokens: a column-split GEMM gathers them first, a row-split one scatters
its sums. `domain/lowering/backward.py` has the backward side.
Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from foretoken.domain.lowering.backward import input_width
from foretoken.domain.lowering.communication import PlacedGroup, axis_group, overlapped_with
from foretoken.domain.lowering.expert_layer import is_expert_node
from foretoken.domain.lowering.graph import (
    BatchShape,
    OperatorNode,
    Partition,
    PrefillShape,
    RankContext,
    Section,
)
from foretoken.domain.lowering.options import (
    LayoutCases,
    Lowering,
    LoweringOptions,
    TrainingOptions,
)
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.requests.limit import Limit
from foretoken.domain.requests.scenario import TrainingScenario


def token_degree(rank: RankContext, options: LoweringOptions) -> int:
    """Return over how many ranks every operator sees its tokens split."""
    training = options.training
    if training is None:
        return 1
    splits_by_tp = training.weight_parallel == "isp"
    return rank.layout.cp * (rank.layout.tp if splits_by_tp else 1)


def local_shape(shape: BatchShape, rank: RankContext, options: LoweringOptions) -> BatchShape:
    """Return the part of a micro batch that a rank has; serving batches are not split."""
    degree = token_degree(rank, options)
    if degree == 1:
        return shape
    prefill = shape.prefill
    if prefill is not None:
        length = prefill.q_tokens // prefill.num_seqs // degree
        prefill = PrefillShape(**prefill_dims(prefill.num_seqs, length, 0))
    return dataclasses.replace(
        shape,
        num_tokens=shape.num_tokens // degree,
        num_output_rows=shape.num_output_rows // degree,
        prefill=prefill,
    )


_COLUMNS = (Partition.COLUMN, Partition.QKV)
# Dimensions that count tokens in operators on whole features.
_TOKEN_DIMS = ("num_tokens", "m", "num_rows")
# Values per token that a vocabulary-split loss sums: the largest logit, the label's, the sum of
# exponents. Source: Megatron-LM, vocab_parallel_cross_entropy.
_NUM_LOSS_SUMS = 3


def splits_tokens(rank: RankContext, training: TrainingOptions | TrainingScenario) -> bool:
    """Return whether what tensor parallelism leaves whole is split by tokens."""
    is_split = training.sequence_parallel or training.weight_parallel in ("msp", "fsp")
    return is_split and rank.layout.tp > 1


def token_limit(cases: LayoutCases, training: TrainingOptions) -> Limit:
    """Return why the tokens of a sequence cannot be split over the ranks of tp."""
    tp, length = cases.tp, training.sequence_length // cases.cp
    return Limit(
        "sequence",
        (cases.is_isp ^ True) & cases.splits_tokens & (length % tp != 0),
        lambda: (
            f"sequence parallelism: {tp} does not divide the {length} tokens of a rank's sequence"
        ),
    )


def add_collectives(nodes: Sequence[OperatorNode], lowering: Lowering) -> tuple[OperatorNode, ...]:
    """Return the split operators of a rank with the collectives between them."""
    group = PlacedGroup.of_rank(axis_group(lowering.rank.layout, "tp"), lowering.rank)
    writer = _Writer(nodes, lowering, group)
    return tuple(part for node in nodes for part in writer.write(node))


class _Writer:
    def __init__(
        self, nodes: Sequence[OperatorNode], lowering: Lowering, group: PlacedGroup
    ) -> None:
        self._nodes = nodes
        self._rank = lowering.rank
        self._group = group
        training = lowering.options.training
        self._is_split = training is not None and splits_tokens(lowering.rank, training)
        self._is_hidden = training is not None and training.trainer.overlaps_tensor_collectives
        self._sums_branches = (
            lowering.rank.model.has_parallel_residual
            and training is not None
            and training.trainer.sums_branches_first
        )

    def write(self, node: OperatorNode) -> Iterator[OperatorNode]:
        if is_expert_node(node):
            yield node
            return
        if self._is_split and node.partition is Partition.REPLICATED:
            yield self._of_own_tokens(node)
            return
        if self._is_split and node.operator == "gemm" and node.partition in _COLUMNS:
            yield self._input_gather(node)
        yield node
        if node.role == "loss":
            message_bytes = DType.FP32.bytes_of(node.dims["num_tokens"])
            reduction = self._group.collective(node, "loss_all_reduce", "all_reduce", message_bytes)
            yield dataclasses.replace(reduction, dtype=DType.FP32, repeat=_NUM_LOSS_SUMS)
        elif self._is_summed(node):
            yield self._output_sum(node)

    def _of_own_tokens(self, node: OperatorNode) -> OperatorNode:
        dims = {
            name: value // self._group.degree if name in _TOKEN_DIMS else value
            for name, value in node.dims.items()
        }
        return dataclasses.replace(node, dims=dims)

    def _input_gather(self, node: OperatorNode) -> OperatorNode:
        message_bytes = node.written_dtype.bytes_of(node.dims["m"] * input_width(node, self._nodes))
        role = f"{node.role}_input_all_gather"
        gather = self._group.collective(node, role, "all_gather", message_bytes)
        return overlapped_with(gather, node.role, is_hidden=self._is_hidden)

    def _is_summed(self, node: OperatorNode) -> bool:
        if self._sums_branches and node.role == "attn_out_proj":
            return False
        is_embedding = node.partition is Partition.VOCAB and node.section is Section.EMBEDDING
        return is_embedding or (node.operator == "gemm" and node.partition is Partition.ROW)

    def _output_sum(self, node: OperatorNode) -> OperatorNode:
        rows = node.dims.get("m", node.dims.get("num_tokens"))
        message_bytes = node.written_dtype.bytes_of(rows * self._rank.model.hidden)
        operator = "reduce_scatter" if self._is_split else "all_reduce"
        role = f"{node.role}_{operator}"
        reduction = self._group.collective(node, role, operator, message_bytes)
        return overlapped_with(reduction, node.role, is_hidden=self._is_hidden)
