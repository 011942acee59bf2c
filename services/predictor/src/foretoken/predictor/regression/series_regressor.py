"""The model of one series: its members, mixed by how far a call is from what was measured."""

from dataclasses import dataclass

import numpy as np

from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.regression.member import (
    NAMES,
    STEPS,
    Members,
    kriging_arrays,
    kriging_from_arrays,
)
from foretoken.predictor.regression.prediction import Prediction, RegressorState
from foretoken.predictor.regression.regime import Regimes
from foretoken.predictor.regression.trees import Trees
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
        members = self.members
        arrays = {
            **members.law.to_arrays(),
            "shares": self.shares,
            **kriging_arrays("kriging", members.kriging),
        }
        grown = {"trees": members.trees, "steps": members.steps}
        texts = {name: trees.text for name, trees in grown.items() if trees.text}
        numbers: dict[str, float] = {}
        for name, trees in grown.items():
            numbers |= _trees_numbers(name, trees)
        return RegressorState(arrays, texts, numbers)

    @classmethod
    def from_state(cls, state: RegressorState, num_threads: int) -> "SeriesRegressor":
        """Return the model that a state was taken from."""
        arrays = state.arrays
        members = Members(
            Regimes.from_arrays(arrays),
            _load_trees("trees", state, num_threads),
            _load_trees("steps", state, num_threads),
            kriging_from_arrays("kriging", arrays),
        )
        return cls(members, arrays["shares"])


def _trees_numbers(name: str, trees: Trees) -> dict[str, float]:
    """Return what trees are in addition to their text; bounds of a constant are not needed."""
    low, high = (trees.low, trees.high) if trees.text else (0.0, 0.0)
    return {f"{name}_constant": trees.constant, f"{name}_low": low, f"{name}_high": high}


def _load_trees(name: str, state: RegressorState, num_threads: int) -> Trees:
    numbers = state.numbers
    bounds = numbers[f"{name}_low"], numbers[f"{name}_high"]
    constant = numbers[f"{name}_constant"]
    return Trees.load(state.texts.get(name, ""), constant, num_threads, bounds)


def mix(answers: Matrix, shares: Matrix, tiers: IntColumn) -> FloatColumn:
    """Return the mean of the members' answers, weighed by the shares of each call's tier."""
    return np.asarray((answers * shares[tiers]).sum(axis=1))


def spread(answers: Matrix, deviation_log: FloatColumn) -> FloatColumn:
    """Return how uncertain calls are: far from points, or distinguished by the members.

    Steps, which rarely count, do not make a call uncertain.
    """
    others = np.delete(answers, STEPS, axis=1) if answers.shape[1] > STEPS else answers
    return np.asarray(np.hypot(deviation_log, others.std(axis=1)))
