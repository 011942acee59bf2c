"""A predictor for hardware of which a part is better: what changes with the hardware."""

from collections.abc import Sequence
from dataclasses import replace

from foretoken.domain.measurements.estimate import LatencyColumns, LatencyQuery, LatencyReply
from foretoken.domain.ports import ModelVersion
from foretoken.simulator.grid import Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.hardware_change import HardwareChange


class FasterPredictor:
    """Answers for changed hardware, from the answers for the real one."""

    def __init__(self, predictor: LatencySource, change: HardwareChange) -> None:
        self._predictor, self._change = predictor, change

    def list_models(self) -> Sequence[ModelVersion]:
        """Return none: what is not real is not kept."""
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return the estimates of the changed hardware."""
        reply = self._predictor.predict(query)
        tables = tuple(
            _scaled(answer, self._change.time_ratio(table, query.device, query.topology))
            for table, answer in zip(query.tables, reply.tables, strict=True)
        )
        return replace(reply, tables=tables)


def _scaled(answer: LatencyColumns, ratio: Floats) -> LatencyColumns:
    return replace(
        answer,
        latency_us=answer.latency_us * ratio,
        low_us=answer.low_us * ratio,
        high_us=answer.high_us * ratio,
    )
