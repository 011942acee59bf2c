"""The parts of a series' model, each an answer of its own to every call.

The law of the work comes first. Trees and kriging both learn what it leaves over: trees know
steps and many features, kriging knows how near the measured points are. Further trees with constant
leaves do without the law: where it is far off beyond the measured range, the ratio to the base
latency at the end of the range holds better.
"""

from dataclasses import dataclass, replace

import numpy as np

from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.regression.cross_validation import Part
from foretoken.predictor.regression.kriging import Kriging, Scales, learn_scales
from foretoken.predictor.regression.regime import Regimes, fit_regimes
from foretoken.predictor.regression.trees import Arrays, TreeRows, Trees
from foretoken.predictor.roofline import FloatColumn, IntColumn

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

    def answer(self, design: Design, inputs: Matrix | None = None) -> tuple[Matrix, FloatColumn]:
        """Return the log ratio of every call by each of `NAMES`, and kriging's deviation.

        `inputs` is what the trees see of the calls, if that is not what the own law says.
        """
        law_log = self.law.log_ratio(design)
        inputs = tree_inputs(design, law_log) if inputs is None else inputs
        residual_log, deviation_log = self.kriging.predict(design.axes)
        answers = [
            law_log + self.trees.predict(inputs),
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


class MemberFitter:
    """Trains members on the points of a series; law and scales are learned from all of them.

    Those of parts of it differ little: a part has the same regimes, and laws of its own in them,
    and trees over it see what the law of all says.
    """

    def __init__(
        self,
        config: PredictorConfig,
        seed: int,
        design: Design,
        log_ratio: FloatColumn,
        sample: IntColumn,
        scales: Scales | None = None,
    ) -> None:
        """Learn what all parts share, but `scales` that are given; parts are of a sample."""
        self._config, self._seed = config, seed
        self._sample, self._log_ratio = design.take(sample), log_ratio[sample]
        self._law = fit_regimes(self._sample, self._log_ratio)
        self._axes, self._residual_log = design.axes, log_ratio - self._law.log_ratio(design)
        self._scales = scales or learn_scales(self._axes, self._residual_log, seed)
        self._inputs = tree_inputs(self._sample, self._law.log_ratio(self._sample))
        self._for_trees = TreeRows(self._inputs, config, is_linear=config.booster.is_linear)
        self._for_steps = TreeRows(self._sample.features, config, is_linear=False)

    def ask_part(self, known: Part, asked: Part) -> tuple[Matrix, FloatColumn]:
        """Train quickly on some of the sample, and return what is said of others of it."""
        quick, rows = self._config.booster.quick, known.rows
        log_ratio = self._log_ratio[rows]
        law = self._law.refit(known.design, log_ratio)
        residual_log = log_ratio - law.log_ratio(known.design)
        trees = self._for_trees.grow(rows, residual_log, quick, self._seed)
        steps = self._for_steps.grow(rows, log_ratio, quick.steps, self._seed)
        kriging = Kriging(known.design.axes, residual_log, self._scales)
        members = Members(law, trees, steps, kriging)
        return members.answer(asked.design, self._inputs[asked.rows])

    def fit(self, *, has_steps: bool) -> Members:
        """Train on the points; without steps these are a constant."""
        booster, rows = self._config.booster, np.arange(self._sample.num_rows)
        residual_log = self._log_ratio - self._inputs[:, -1]
        trees = self._for_trees.grow(rows, residual_log, booster, self._seed)
        if not has_steps:
            rows = rows[:0]
        steps = self._for_steps.grow(rows, self._log_ratio[rows], booster.steps, self._seed)
        kriging = Kriging(self._axes, self._residual_log, self._scales)
        return Members(self._law, trees, steps, kriging)


def tree_inputs(design: Design, law_log: FloatColumn) -> Matrix:
    """Return what the trees over the law see of every call, what the law says last."""
    return np.column_stack([design.features, law_log])
