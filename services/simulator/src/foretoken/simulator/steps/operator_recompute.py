"""Recomputation operator by operator: all of a layer runs again but what costs most to make.

Kept are the input of a layer and the outputs of attention, of reduce-scatters, of exchanges between
experts and of every other matrix product in the order in which a layer runs them: of a gated layer
query, value, gate and down projection, while key, output and up projection run again. Products in
8 bit are none of those: `_scaled_mm` is not in the list of what is kept, so all of them run again.
Source: pytorch/torchtitan, `distributed/activation_checkpoint.py` (selective_ac_option "op"),
`models/llama3/infra/parallelize.py` (_op_sac_save_list) and `models/llama3/model.py`; PyTorch,
`torch/utils/checkpoint.py` (early_stop).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.stack import stack_of
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.steps.held.saved_tensor import SavedTensor
from foretoken.simulator.steps.held.tensor_size import written_bytes

# What `recompute_modules` calls it.
EVERY_OTHER_MATMUL = "every_other_matmul"
_ATTENTION = ("attention_prefill", "attention_prefill_window", "mla_prefill")
_EXCHANGES = ("reduce_scatter", "all_to_all")
# Its product is made again and is none of those counted.
_ROUTER = "moe_router"
# One operator for what are two products, of the gate and of the other half.
_GATED = ("mlp_up_proj", "shared_up_proj")
_QUERY_KEY_VALUE = "attn_qkv_proj"


def split_outputs(
    saved: Sequence[SavedTensor], forward: Nodes, scenario: TrainingScenario
) -> tuple[tuple[SavedTensor, ...], tuple[SavedTensor, ...]]:
    """Return what layers keep besides their inputs, and what they make again of `saved`."""
    outputs = tuple(_list_outputs(forward, saved, scenario))
    kept = {(output.producer, output.layers): output.num_bytes for output in outputs}
    rebuilt = []
    for tensor in saved:
        num_bytes = tensor.num_bytes - kept.get((tensor.producer, tensor.layers), 0)
        if tensor.section is Section.LAYER and num_bytes > 0:
            rebuilt.append(dataclasses.replace(tensor, num_bytes=num_bytes))
    return outputs, tuple(rebuilt)


def list_rerun(
    forward: Nodes, saved: Sequence[SavedTensor], scenario: TrainingScenario
) -> Iterator[OperatorNode]:
    """Yield the operators of layers that run again, those in parts with their share."""
    shares = _kept_shares(forward, scenario)
    for node in before_last_use(forward, saved):
        if node.operator in (*_ATTENTION, *_EXCHANGES):
            continue
        again = 1 - shares.get(id(node), 0.0)
        if again:
            yield node if again == 1 else dataclasses.replace(node, share=node.share * again)


def before_last_use(forward: Nodes, saved: Sequence[SavedTensor]) -> Iterator[OperatorNode]:
    """Yield the operators of layers whose outputs a backward pass needs, as does what it saves.

    The last that keeps its input, and what comes after it, need not run again.
    """
    savers = {tensor.role for tensor in saved if tensor.section is Section.LAYER}
    in_layers = [node for node in forward if node.section is Section.LAYER]
    last: dict[int, int] = {}
    for index, node in enumerate(in_layers):
        if node.role in savers:
            last.update(dict.fromkeys(node.layers, index))
    for index, node in enumerate(in_layers):
        if index < last.get(node.first_layer, 0):
            yield node


def _list_outputs(
    forward: Nodes, saved: Sequence[SavedTensor], scenario: TrainingScenario
) -> Iterator[SavedTensor]:
    """Yield the outputs that are kept, each with the operator that reads it."""
    shares = _kept_shares(forward, scenario)
    in_layers = [node for node in forward if node.section is Section.LAYER]
    needed = set(map(id, before_last_use(forward, saved)))
    keeps_all = scenario.trainer.resolve().keeps_unread_outputs
    for index, node in enumerate(in_layers):
        num_bytes = _output_bytes(node, shares, scenario.layout.tp)
        if num_bytes and (keeps_all or id(node) in needed):
            yield SavedTensor(
                role=_find_reader(in_layers[index + 1 :], node),
                producer=node.role,
                section=Section.LAYER,
                num_bytes=num_bytes,
                layers=tuple(node.layers),
            )


def _output_bytes(node: OperatorNode, shares: Mapping[int, float], tp: int) -> int:
    if node.operator in _ATTENTION:
        # The logarithm of the sum of exponents of every query and head is kept with it.
        per_head = int(node.dims["q_tokens"] * node.dims["num_heads"])
        return int(written_bytes(node) + DType.FP32.bytes_of(per_head))
    if node.operator in _EXCHANGES:
        num_parts = tp if node.operator == "reduce_scatter" else 1
        return int(node.dims["message_bytes"]) // num_parts
    return int(written_bytes(node) * shares.get(id(node), 0.0))


def _find_reader(following: Sequence[OperatorNode], node: OperatorNode) -> str:
    """Return the next operator of the same layer that is no collective."""
    for other in following:
        is_near = node.first_layer in other.layers
        if is_near and not find_operator(other.operator).is_collective:
            return other.role
    return node.role


def _kept_shares(forward: Nodes, scenario: TrainingScenario) -> Mapping[int, float]:
    """Return the share of its output that every matrix product keeps, by identity."""
    counts: defaultdict[int, int] = defaultdict(int)
    shares = {}
    for node in forward:
        is_counted = node.section is Section.LAYER and node.operator == "gemm"
        if not is_counted or node.role == _ROUTER or node.dtype is DType.FP8:
            continue
        widths = _widths(node, scenario)
        # Layers of a model in a pattern may differ in how many products come before it.
        kept = sum(
            width
            for layer in node.layers
            for at, width in enumerate(widths, counts[layer])
            if at % 2 == 0
        )
        shares[id(node)] = kept / (sum(widths) * node.repeat)
        for layer in node.layers:
            counts[layer] += len(widths)
    return shares


def _widths(node: OperatorNode, scenario: TrainingScenario) -> tuple[int, ...]:
    """Return how wide the products are that one operator stands for, relative to each other."""
    layer = stack_of(scenario.model).layers[node.first_layer]
    if node.role == _QUERY_KEY_VALUE and layer.mixer is not None:
        num_kv_heads = layer.mixer["num_kv_heads"]
        return layer.mixer["num_heads"], num_kv_heads, num_kv_heads
    is_gated = layer.feed_forward is not None and layer.feed_forward["is_gated"]
    return (1, 1) if node.role in _GATED and is_gated else (1,)
