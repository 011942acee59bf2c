"""What decoding sequences add to the attention kernel that also computes prefills.

Some engines run one kernel over a whole batch. Decoding sequences then go through blocks shaped for
prefills, which can take twice what a kernel of their own takes.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import LatencyColumns, OperatorTable
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.units import Quantity
from foretoken.simulator.cost.answer import Answers, Questions, is_measured_here, table_of_node
from foretoken.simulator.cost.family import Axes
from foretoken.simulator.grid import cross_points

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
