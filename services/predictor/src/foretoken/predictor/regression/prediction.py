"""What a model of one series answers, before intervals are put around it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from foretoken.predictor.features import Design
from foretoken.predictor.roofline import FloatColumn, IntColumn


@dataclass(frozen=True, slots=True)
class Prediction:
    """One value per call: log(latency / base), and how uncertain it is compared with the others.

    `spread_log` is positive, in log units, and right up to a factor that calibration learns.
    `members` holds what each part of the model said by itself, by name.
    """

    log_ratio: FloatColumn
    spread_log: FloatColumn
    members: Mapping[str, FloatColumn] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RegressorState:
    """All that a trained model is but its points, in parts that can be stored without pickling.

    Equal trainings give equal states.
    """

    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)


class Regressor(Protocol):
    """A trained function from calls to predictions."""

    def predict(self, design: Design, tiers: IntColumn) -> Prediction:
        """Return the prediction of every call; `tiers` says how far each is from measurements."""

    def to_state(self) -> RegressorState:
        """Return what the model is made of."""
