"""The answer of a model pooled over devices, for one of them."""

from dataclasses import dataclass

import numpy as np

from foretoken.predictor.features import Design
from foretoken.predictor.regression.prediction import RegressorState
from foretoken.predictor.regression.trees import Trees
from foretoken.predictor.roofline import FloatColumn
from foretoken.predictor.transfer.device_columns import join_columns
from foretoken.predictor.transfer.device_law import LAW_REVISION, DeviceLaw

_REVISION = "law_revision"


@dataclass(frozen=True, slots=True)
class PooledModel:
    """Log ratio of calls on a device: two models on average, that err apart.

    One set of trees corrects the base latency, the other the law of the device. `device` is what
    `describe_device` says of it, `basis` in words what the answer rests on.
    """

    over_base: Trees
    over_law: Trees
    law: DeviceLaw
    device: FloatColumn
    basis: str

    def log_ratio(self, design: Design) -> FloatColumn:
        """Return log(latency / base latency) of every call."""
        first = self.over_base.predict(join_columns(design, self.device, None))
        second = self.over_law.predict(join_columns(design, self.device, self.law))
        return np.asarray(0.5 * (first + self.law.log_ratio(design) + second))

    def to_state(self) -> RegressorState:
        """Return what the model is made of."""
        return RegressorState(
            arrays={
                "law": self.law.parameters,
                "device": self.device,
                **self.over_base.to_arrays("over_base"),
                **self.over_law.to_arrays("over_law"),
            },
            numbers={"basis": self.basis, _REVISION: LAW_REVISION},
        )

    @classmethod
    def from_state(cls, state: RegressorState) -> "PooledModel | None":
        """Return the model that gave the state, None where its law meant something else."""
        if state.numbers.get(_REVISION) != LAW_REVISION:
            return None
        return cls(
            over_base=Trees.from_arrays("over_base", state.arrays),
            over_law=Trees.from_arrays("over_law", state.arrays),
            law=DeviceLaw(state.arrays["law"]),
            device=state.arrays["device"],
            basis=str(state.numbers["basis"]),
        )
