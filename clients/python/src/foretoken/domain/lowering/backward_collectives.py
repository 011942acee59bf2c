"""What the collectives of a forward pass become in the backward pass.

The gradient of a gather is a scatter of sums and the other way round, that of an exchange the
exchange back. What tensor parallelism sums in the forward pass needs nothing backward; instead the
input gradient of each column-split GEMM is summed. With sequence parallelism that sum is scattered,
and the input, of which a rank kept its tokens alone, is gathered again for the weight gradient.
Source: Megatron-Core, `tensor_parallel/layers.py` (LinearWithGradAccumulationAndAsyncCommunication)
and `mappings.py`; InternEvo, `linear.py`: `msp` keeps the gathered input, `fsp` gathers it again.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from foretoken.domain.lowering.communication import overlapped_with
from foretoken.domain.lowering.graph import OperatorNode, Overlap, Partition, Section
from foretoken.domain.lowering.options import LoweringOptions, TrainingOptions
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.units import Quantity

_MIRRORS = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "send_recv": "send_recv",
}
# Sums over copies of the tokens, whose gradients are summed, or gathered, alike.
_ALIKE = ("moe_unpermute_all_reduce", "moe_unpermute_all_gather")
# The gradient of what came back goes out, in the format of what goes out, and the reverse.
_DIRECTIONS = {
    "moe_dispatch_all_to_all": "moe_combine_all_to_all",
    "moe_combine_all_to_all": "moe_dispatch_all_to_all",
}
# What another operator's backward pass brings: see `with_input_collectives`.
_GATHERED_INPUT = "_input_all_gather"
_GATHERED_WEIGHT = "_weight_all_gather"
_COLUMNS = (Partition.COLUMN, Partition.QKV)
_GEMMS = ("gemm", "grouped_gemm")


def input_width(gemm: OperatorNode, nodes: Sequence[OperatorNode]) -> Quantity:
    """Return the features of a column-split GEMM's input that the ranks of tp share.

    With the latent vector goes the part of the key that carries the position.
    """
    if gemm.role != "attn_kv_proj":
        return gemm.dims["k"]
    widths = (node.dims.get("qk_rope_head_dim", 0) for node in nodes)
    return gemm.dims["k"] + max(widths)


def keeps_gathered_input(training: TrainingOptions | TrainingScenario) -> bool:
    """Tell whether the gathered input of a column-split GEMM is kept for the backward pass."""
    return training.weight_parallel == "msp"


def with_input_collectives(
    dgrad: OperatorNode,
    gemm: OperatorNode,
    nodes: Sequence[OperatorNode],
    options: LoweringOptions | None,
) -> Iterator[OperatorNode]:
    """Yield the input gradient of one of a rank's GEMMs, with its collectives around it."""
    if gemm.operator != "gemm" or gemm.partition not in _COLUMNS:
        yield dgrad
        return
    training = options.training if options else None
    is_hidden = training is not None and _hides_gradients(training)
    gather_role = gemm.role + _GATHERED_INPUT
    gather = next((node for node in nodes if node.role == gather_role), None)
    if gather is not None and not (training and keeps_gathered_input(training)):
        again = _exposed(gather, f"{gemm.role}_saved_input_all_gather")
        yield overlapped_with(again, dgrad.role, is_hidden=is_hidden)
    yield dgrad
    reduction = _input_reduction(gemm, gather, nodes)
    if reduction is not None:
        yield overlapped_with(reduction, f"{gemm.role}_wgrad", is_hidden=is_hidden)


def _input_reduction(
    gemm: OperatorNode, gather: OperatorNode | None, nodes: Sequence[OperatorNode]
) -> OperatorNode | None:
    if gather is not None:
        node = _exposed(gather, f"{gemm.role}_dgrad_reduce_scatter")
        return dataclasses.replace(node, operator="reduce_scatter")
    # The group is that of any sum of tensor parallelism.
    sums = (node for node in nodes if node.axis == "tp" and node.operator == "all_reduce")
    known = next(sums, None)
    if known is None:
        return None
    message_bytes = gemm.written_dtype.bytes_of(gemm.dims["m"] * input_width(gemm, nodes))
    return dataclasses.replace(
        _exposed(known, f"{gemm.role}_dgrad_all_reduce"),
        section=gemm.section,
        dims={**known.dims, "message_bytes": message_bytes},
        dtype=gemm.written_dtype,
        repeat=gemm.repeat,
        first_layer=gemm.first_layer,
        layer_stride=gemm.layer_stride,
    )


def mirror_collective(node: OperatorNode, nodes: Sequence[OperatorNode]) -> Iterator[OperatorNode]:
    """Yield what a forward collective of a rank becomes in the backward pass."""
    if node.role == "stage_send_mask" or node.role.endswith(_GATHERED_INPUT):
        return
    if node.role.endswith(_GATHERED_WEIGHT):
        yield from _gather_and_scatter(node)
        return
    role = f"{node.role}_backward"
    if node.section is Section.BOUNDARY or node.role in _ALIKE:
        yield dataclasses.replace(node, role=role)
    elif node.operator in _MIRRORS:
        mirror = dataclasses.replace(
            node,
            role=role,
            operator=_MIRRORS[node.operator],
            dims=_dims_back(node, nodes),
            overlaps_with=_backward_role(node.overlaps_with, nodes),
        )
        yield from _ring(mirror) if node.operator == "send_recv" else (mirror,)


def _dims_back(node: OperatorNode, nodes: Sequence[OperatorNode]) -> Mapping[str, Quantity]:
    way_back = _DIRECTIONS.get(node.role)
    return next((other.dims for other in nodes if other.role == way_back), node.dims)


def _ring(send: OperatorNode) -> Iterator[OperatorNode]:
    """Yield what goes around backward: keys and values, together with their gradients.

    The gradients go one step further, back to where the keys are from.
    """
    once = send.dims["message_bytes"]
    yield dataclasses.replace(send, dims={**send.dims, "message_bytes": 2 * once})
    if send.role.endswith("_ring_send_1_backward"):
        yield _exposed(send, send.role.replace("_ring_send_1_", "_ring_return_"))


def _gather_and_scatter(gather: OperatorNode) -> Iterator[OperatorNode]:
    yield dataclasses.replace(gather, role=f"{gather.role}_backward")
    role = gather.role.replace(_GATHERED_WEIGHT, "_weight_gradient_reduce_scatter")
    yield dataclasses.replace(
        gather, role=role, operator="reduce_scatter", overlap=Overlap.DEFERRED
    )


def _hides_gradients(training: TrainingOptions) -> bool:
    trainer = training.trainer
    is_hidden = trainer.overlaps_tensor_gradients or trainer.overlaps_tensor_collectives
    return is_hidden or training.weight_parallel in ("msp", "fsp")


def _exposed(node: OperatorNode, role: str) -> OperatorNode:
    return dataclasses.replace(node, role=role, overlap=Overlap.EXPOSED, overlaps_with="")


def _backward_role(role: str, nodes: Sequence[OperatorNode]) -> str:
    if not role:
        return ""
    is_gemm = any(node.role == role and node.operator in _GEMMS for node in nodes)
    return f"{role}_dgrad" if is_gemm else f"{role}_backward"
