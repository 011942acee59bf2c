"""A predictor for devices of which one part is twice as fast: what changes with the hardware."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.estimate import LatencyColumns, LatencyQuery, LatencyReply, OperatorTable
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import RooflineTerms, collective_terms, compute_terms
from foretoken.domain.hardware.topology import TopologySpec, find_topology, topology_of_device
from foretoken.domain.operator import OperatorSpec, find_operator
from foretoken.domain.ports import ModelVersion
from foretoken.simulator.grid import Floats
from foretoken.simulator.latency_source import LatencySource

# How much faster a part of the hardware is.
_FACTOR = 2.0


class FasterPredictor:
    """Answers for devices of which one part is twice as fast, from those of the real ones.

    No predictor has measured such a device. An operator keeps the share it reaches of its roofline,
    the larger of its arithmetic and its bytes, each over what the device can do; of a collective
    the bytes go over faster links and the latency stays. So what is bound by another part does not
    change, and what is bound by this one does until the other binds.
    """

    def __init__(self, predictor: LatencySource, part: str) -> None:
        self._predictor, self._part = predictor, part

    def list_models(self) -> Sequence[ModelVersion]:
        """Return none: what is not real is not kept."""
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return the estimates of the changed device."""
        reply = self._predictor.predict(query)
        tables = tuple(
            _scaled(answer, self._ratio(table, query))
            for table, answer in zip(query.tables, reply.tables, strict=True)
        )
        return replace(reply, tables=tables)

    def _ratio(self, table: OperatorTable, query: LatencyQuery) -> Floats:
        """Return the time on the changed device over that on the real one, row by row."""
        spec = find_operator(table.operator)
        dims = {name: np.asarray(column) for name, column in table.columns.items()}
        if spec.is_collective:
            topology = (
                find_topology(query.topology)
                if query.topology
                else topology_of_device(query.device)
            )
            if self._part != "links":
                return np.ones(table.num_rows)
            return _faster_links_ratio(spec, dims, topology, table.num_rows)
        device = find_device(query.device)
        return self._compute_ratio(compute_terms(spec, dims, table.dtype, table.phase, device))

    def _compute_ratio(self, terms: RooflineTerms) -> Floats:
        compute = np.asarray(terms.compute_us, dtype=np.float64)
        memory = np.asarray(terms.memory_us, dtype=np.float64)
        faster_compute = compute / (_FACTOR if self._part == "arithmetic" else 1.0)
        faster_memory = memory / (_FACTOR if self._part == "memory" else 1.0)
        before = np.maximum(compute, memory)
        after = np.maximum(faster_compute, faster_memory)
        return np.where(before > 0.0, after / np.maximum(before, 1e-12), 1.0)


def _faster_links_ratio(
    spec: OperatorSpec, dims: Mapping[str, np.ndarray], topology: TopologySpec, num_rows: int
) -> Floats:
    """Return the time of collectives over twice the bandwidth, each over as many nodes as it is."""
    num_nodes = np.broadcast_to(dims.get("num_nodes", np.ones(1)), (num_rows,))
    ratio = np.ones(num_rows)
    for nodes in np.unique(num_nodes).tolist():
        rows = num_nodes == nodes
        of_rows = {
            name: np.broadcast_to(column, (num_rows,))[rows] for name, column in dims.items()
        }
        terms = collective_terms(spec, of_rows, int(nodes), topology)
        moved = np.asarray(terms.memory_us, dtype=np.float64)
        whole = moved + terms.floor_us
        ratio[rows] = (moved / _FACTOR + terms.floor_us) / np.maximum(whole, 1e-12)
    return ratio


def _scaled(answer: LatencyColumns, ratio: Floats) -> LatencyColumns:
    return replace(
        answer,
        latency_us=answer.latency_us * ratio,
        low_us=answer.low_us * ratio,
        high_us=answer.high_us * ratio,
    )
