"""The part of a predictor that simulations and searches ask."""

from collections.abc import Sequence
from typing import Protocol

from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply
from foretoken.domain.measurements.latency_models import ModelVersion


class LatencySource(Protocol):
    """Prices operators; any predictor does."""

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return estimates for every row of every table."""

    def list_models(self) -> Sequence[ModelVersion]:
        """Return the stored model versions."""
