"""The parts of a series' model, each an answer of its own to every call.

The law of the work comes first. Trees and kriging both learn what it leaves over: trees know
steps and many features, kriging knows how near the measured points are. Further trees with constant
leaves do without the law: where it is far off beyond the measured range, the ratio to the base
latency at the end of the range holds better.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.regression.kriging import Kriging, Scales, learn_scales
from foretoken.predictor.regression.regime import Regimes, fit_regimes
from foretoken.predictor.regression.trees import Arrays, Trees, grow_trees
from foretoken.predictor.roofline import FloatColumn

# The place of the trees that do without the law among the members.
STEPS = 2

NAMES = ("trees", "kriging", "steps")


@dataclass(frozen=True, slots=True)
class Members:
    """The trained parts of a model."""

    law: Regimes
    trees: Trees
    steps: Trees
    kriging: Kriging

    def settle(self) -> "Members":
        """Return the members as they are after a restart."""
        return replace(self, trees=self.trees.settle(), steps=self.steps.settle())

    def answer(self, design: Design) -> tuple[Matrix, FloatColumn]:
        """Return the log ratio of every call by each of `NAMES`, and kriging's deviation."""
        law_log = self.law.log_ratio(design)
        residual_log, deviation_log = self.kriging.predict(design.axes)
        answers = [
            law_log + self.trees.predict(tree_inputs(design, law_log)),
            law_log + residual_log,
            self.steps.predict(design.features),
        ]
        return np.column_stack(answers), deviation_log

    def to_arrays(self) -> Arrays:
        """Return what is stored: all but what kriging takes from the points themselves."""
        scales = self.kriging.scales
        return {
            **self.law.to_arrays(),
            **self.trees.to_arrays("trees"),
            **self.steps.to_arrays("steps"),
            "scales": np.array([*scales.lengths_log, scales.nugget_log, scales.sill_log]),
        }

    @classmethod
    def from_arrays(cls, arrays: Arrays, design: Design, log_ratio: FloatColumn) -> "Members":
        """Return the members from what is stored, and from the points they were trained on."""
        law = Regimes.from_arrays(arrays)
        trees, steps = (Trees.from_arrays(name, arrays) for name in ("trees", "steps"))
        *lengths_log, nugget_log, sill_log = arrays["scales"].tolist()
        scales = Scales(np.array(lengths_log), nugget_log, sill_log)
        residual_log = log_ratio - law.log_ratio(design)
        return cls(law, trees, steps, Kriging(design.axes, residual_log, scales))


@dataclass(frozen=True, slots=True)
class MemberFitter:
    """Trains members on the points of a series; law and scales were learned from all of them.

    Those of parts of it differ little: a part has the same regimes, and laws of its own in them.
    """

    config: PredictorConfig
    seed: int
    law: Regimes
    scales: Scales

    @classmethod
    def learn(
        cls, config: PredictorConfig, seed: int, design: Design, log_ratio: FloatColumn
    ) -> Self:
        """Return what trains the members of a series."""
        law = fit_regimes(design, log_ratio)
        residual_log = log_ratio - law.log_ratio(design)
        return cls(config, seed, law, learn_scales(design.axes, residual_log, seed))

    def fit_part(self, design: Design, log_ratio: FloatColumn) -> Members:
        """Train quickly on some of the points."""
        quick = replace(self.config, booster=self.config.booster.quick)
        part = replace(self, config=quick, law=self.law.refit(design, log_ratio))
        return part.fit(design, log_ratio, has_steps=True)

    def fit(self, design: Design, log_ratio: FloatColumn, *, has_steps: bool) -> Members:
        """Train on the points; without steps these are a constant."""
        law_log = self.law.log_ratio(design)
        residual_log = log_ratio - law_log
        trees = grow_trees(tree_inputs(design, law_log), residual_log, self.config, self.seed)
        as_steps = replace(self.config, booster=self.config.booster.steps)
        rows = slice(None) if has_steps else slice(0)
        steps = grow_trees(design.features[rows], log_ratio[rows], as_steps, self.seed)
        return Members(self.law, trees, steps, Kriging(design.axes, residual_log, self.scales))


def tree_inputs(design: Design, law_log: FloatColumn) -> Matrix:
    """Return what the trees over the law see of every call, what the law says last."""
    return np.column_stack([design.features, law_log])
