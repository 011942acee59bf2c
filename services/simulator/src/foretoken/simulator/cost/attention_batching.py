"""What a batch adds to attention: a prefill more, and decodes that share its kernel.

Some engines run one kernel over a whole batch. Decoding sequences then go through blocks shaped for
prefills, which can take twice what a kernel of their own takes.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import LatencyColumns, OperatorTable
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.units import US_PER_S, Quantity
from foretoken.simulator.cost.answer import (
    Answers,
    Questions,
    covered_rows,
    is_measured_here,
    table_of_node,
)
from foretoken.simulator.cost.family import BATCHED, Axes
from foretoken.simulator.grid import Floats, cross_points

# Rows of queries that a block of the attention kernel takes, and whether the query heads that share
# a key head are rows of one block. Source: FlashAttention 2, `flash_fwd_launch_template.h`
# (kBlockM of the kernel over paged keys), and FlashAttention 3, `tile_size.h` and `heuristics.h`.
_ROWS_PER_HEAD_BLOCK, _ROWS_PER_PACKED_BLOCK = 64, 128
# Architectures on which engines run the kernel that packs heads.
_PACKING = frozenset({"hopper"})


def each_more(
    node: OperatorNode, one: LatencyColumns, batched: LatencyColumns, device: DeviceSpec
) -> LatencyColumns:
    """Return what each prefill more takes: no less than nothing, no more than alone.

    `node` asked about one prefill, `batched` answers for `BATCHED` of each kind. Where such batches
    were measured they say it. Elsewhere a prefill takes the device for as long as alone, but only
    the part of it that its blocks are on, and no less than its bytes take.
    """
    one_us = np.asarray(one.latency_us, dtype=np.float64)
    measured_us = (np.asarray(batched.latency_us) - one_us) / (BATCHED - 1)
    more_us = np.where(covered_rows(batched), measured_us, _shared_us(node, one_us, device))
    bounded_us = np.clip(more_us, 0.0, one_us)
    ratio = np.divide(bounded_us, one_us, out=np.zeros_like(one_us), where=one_us > 0.0)
    return LatencyColumns(
        latency_us=one_us * ratio,
        low_us=one.low_us * ratio,
        high_us=one.high_us * ratio,
        provenance=one.provenance,
    )


def _shared_us(node: OperatorNode, one_us: Floats, device: DeviceSpec) -> Floats:
    columns = table_of_node(node).columns
    if "num_kv_heads" not in columns:
        return one_us
    filled = _num_blocks(columns, device) / device.num_sms
    moved = find_operator(node.operator).moved_bytes(columns, node.dtype.num_bytes)
    bytes_us = np.asarray(moved) / device.memory_bandwidth_bytes_per_s * US_PER_S
    shared: Floats = np.maximum(one_us * np.minimum(filled, 1.0), bytes_us)
    return shared


def _num_blocks(columns: Mapping[str, Floats], device: DeviceSpec) -> Floats:
    queries = np.asarray(columns["q_tokens"], dtype=np.float64)
    heads, kv_heads = columns["num_heads"], columns["num_kv_heads"]
    if device.architecture in _PACKING:
        blocks: Floats = np.ceil(queries * heads / kv_heads / _ROWS_PER_PACKED_BLOCK) * kv_heads
    else:
        blocks = np.ceil(queries / _ROWS_PER_HEAD_BLOCK) * heads
    return blocks


_HEAD_DIMS = ("num_heads", "num_kv_heads", "head_dim")


class MixedAttention:
    """The tables of one decode operator inside the kernel of a mixed batch, on the mixed grid."""

    def __init__(self, node: OperatorNode, axes: Axes) -> None:
        num_points = len(cross_points(axes[1:])[0])
        num_prefills = len(axes[0])
        decode = {
            name: np.tile(column, num_prefills)
            for name, column in table_of_node(node).columns.items()
        }
        longest = np.repeat(axes[0], num_points)
        prefill = prefill_dims(1 + 0 * longest, longest, 0 * longest)
        heads = {name: decode[name] for name in _HEAD_DIMS}
        in_batch = {
            "num_decode_seqs": decode["num_seqs"],
            "decode_kv_tokens": decode["kv_tokens"],
            "decode_kv_tokens_max": decode["kv_tokens_max"],
        }
        self._whole = _table(node, "attention_mixed", {**prefill, **in_batch, **heads})
        self._alone = _table(node, "attention_prefill", {**prefill, **heads})

    def ask(self, questions: Questions) -> None:
        """Ask about the kernel with and without the decoding sequences."""
        questions.add(self._whole)
        questions.add(self._alone)

    def added(self, answers: Answers) -> LatencyColumns | None:
        """Return what the decoding sequences add; None where nobody measured such a kernel."""
        whole, alone = answers.of(self._whole), answers.of(self._alone)
        if not is_measured_here(whole):
            return None
        alone_us = np.asarray(alone.latency_us, dtype=np.float64)
        return LatencyColumns(
            latency_us=np.maximum(whole.latency_us - alone_us, 0.0),
            low_us=np.maximum(whole.low_us - alone_us, 0.0),
            high_us=np.maximum(whole.high_us - alone_us, 0.0),
            provenance=whole.provenance,
        )


def repeat_answer(answer: LatencyColumns, times: int) -> LatencyColumns:
    """Return the answer of a decode operator for each longest prefill: it runs on its own."""
    return LatencyColumns(
        latency_us=np.tile(answer.latency_us, times),
        low_us=np.tile(answer.low_us, times),
        high_us=np.tile(answer.high_us, times),
        provenance=np.tile(answer.provenance, times),
    )


def find_mixed(stages: Sequence[Sequence[OperatorNode]], axes: Axes) -> dict[int, MixedAttention]:
    """Return the decode operators that a mixed kernel could take in, by the node's id."""
    return {
        id(node): MixedAttention(node, axes)
        for stage in stages
        for node in stage
        if node.operator == "attention_decode"
    }


def _table(node: OperatorNode, operator: str, columns: Mapping[str, Quantity]) -> OperatorTable:
    return OperatorTable(
        operator=operator,
        dtype=node.dtype,
        phase=node.phase,
        columns=columns,
        variant=node.variant,
    )
