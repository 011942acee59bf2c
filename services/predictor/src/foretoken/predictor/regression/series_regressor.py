"""The model of one series: its members, mixed by how far a call is from what was measured."""

from dataclasses import dataclass

import numpy as np

from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.regression.member import NAMES, STEPS, Members
from foretoken.predictor.regression.prediction import Prediction, RegressorState
from foretoken.predictor.roofline import FloatColumn, IntColumn


@dataclass(frozen=True, slots=True)
class SeriesRegressor:
    """Members and their shares: one row per tier, one column per member."""

    members: Members
    shares: Matrix

    def predict(self, design: Design, tiers: IntColumn) -> Prediction:
        """Return the prediction of every call."""
        answers, deviation_log = self.members.answer(design)
        columns = dict(zip(NAMES, answers.T, strict=True))
        log_ratio = mix(answers, self.shares, tiers)
        return Prediction(log_ratio, spread(answers, deviation_log), columns)

    def to_state(self) -> RegressorState:
        """Return what the model is made of."""
        return RegressorState({**self.members.to_arrays(), "shares": self.shares})

    @classmethod
    def from_state(
        cls, state: RegressorState, design: Design, log_ratio: FloatColumn
    ) -> "SeriesRegressor":
        """Return the model that a state was taken from, trained on these points."""
        members = Members.from_arrays(state.arrays, design, log_ratio)
        return cls(members, state.arrays["shares"])


def mix(answers: Matrix, shares: Matrix, tiers: IntColumn) -> FloatColumn:
    """Return the mean of the members' answers, weighed by the shares of each call's tier."""
    return np.asarray((answers * shares[tiers]).sum(axis=1))


def spread(answers: Matrix, deviation_log: FloatColumn) -> FloatColumn:
    """Return how uncertain calls are: far from points, or distinguished by the members.

    Steps, which rarely count, do not make a call uncertain.
    """
    others = np.delete(answers, STEPS, axis=1) if answers.shape[1] > STEPS else answers
    return np.asarray(np.hypot(deviation_log, others.std(axis=1)))
