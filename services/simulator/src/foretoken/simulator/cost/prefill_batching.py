"""What one prefill more takes in a batch: short ones do not fill a device, so it has room."""

from collections.abc import Mapping

import numpy as np

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import LatencyColumns
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.units import US_PER_S
from foretoken.simulator.cost.answer import covered_rows, table_of_node
from foretoken.simulator.cost.family import BATCHED
from foretoken.simulator.grid import Floats

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
