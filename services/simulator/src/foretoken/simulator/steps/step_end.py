"""What follows the pipeline: reduce gradients, update parameters, gather them.

Buckets of gradients whose collective may overlap are reduced from the last backward pass on, each
as soon as its share of that pass is done. The others follow when all has been computed. No rank
updates before all have reduced: the norm that gradients are clipped to, and whether any of them
overflowed, are those of the whole model. A step that found an overflow updates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.simulator.grid import Floats
from foretoken.simulator.steps.chunks import NEVER, LastPass, gather_during, reduce_early
from foretoken.simulator.steps.pipelines.events import Time


def host_gap_us(trainer: TrainerProfile, calibration: TrainingCalibration | None) -> float:
    """Return what a step costs on the host besides its launches, as a user's runs correct it."""
    return trainer.step_gap_us + (calibration.step_gap_us if calibration else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankWork:
    """What a rank has done when its passes end, and what it has still to do, in µs: [..., case].

    `last` are the last backward passes of its chunks in the order in which they begin, `carried_us`
    is what its communication carries besides its passes. Of sums of gradients it waits for
    `waited_us` when all is computed; of the gathered parameters `early_gather_us` may overlap one
    forward pass of every chunk, `forward_us`.
    """

    end_us: Floats
    last: Sequence[LastPass]
    carried_us: Time
    waited_us: Floats
    check_us: Floats
    update_us: Floats
    early_gather_us: Floats
    late_gather_us: Floats
    forward_us: Floats
    slowdown_ratio: float

    @property
    def reduction_us(self) -> Floats:
        """All sums of gradients once a step, hidden or not."""
        buckets = [item for last in self.last for item in last.buckets]
        return sum((item.carried_us for item in buckets), self.waited_us)

    @property
    def gather_us(self) -> Floats:
        """All gathering of parameters."""
        return self.early_gather_us + self.late_gather_us


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankEnd:
    """How one rank ends a step, in µs, as columns.

    It waits for `exposed_reduction_us` and `exposed_gather_us`. `reduction_start_us` is when it
    begins to reduce gradients, `reduced_us` when it has.
    """

    work: RankWork
    reduction_start_us: Floats
    reduced_us: Floats
    exposed_reduction_us: Floats
    exposed_gather_us: Floats

    @classmethod
    def of_work(cls, work: RankWork) -> "RankEnd":
        """Return how a rank ends that has this to do."""
        none = np.zeros_like(work.end_us)
        first_us, free_us = reduce_early(work.last, work.carried_us, none)
        computed_us = np.maximum(work.end_us, free_us)
        gather_us = gather_during(work.early_gather_us, work.forward_us, work.slowdown_ratio)
        return cls(
            work=work,
            reduction_start_us=np.where(first_us == NEVER, work.end_us, first_us),
            reduced_us=computed_us + work.waited_us,
            exposed_reduction_us=computed_us - work.end_us + work.waited_us,
            exposed_gather_us=work.late_gather_us + gather_us,
        )

    @property
    def after_start_us(self) -> Floats:
        """Time from the start of the update to its end."""
        return self.work.check_us + self.work.update_us + self.exposed_gather_us


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepEnd:
    """The end of a step: all ranks begin to update at `update_start_us`.

    `lags` tell of every rank how much later the slowest replica has its gradients, as a ratio of
    the time since the step's start.
    """

    ranks: Sequence[RankEnd]
    update_start_us: Floats
    step_us: Floats
    gap_us: Any
    lags: Sequence[Any]

    @classmethod
    def of_ranks(cls, ranks: Sequence[RankEnd], gap_us: Any, lags: Sequence[Any] = ()) -> "StepEnd":
        """Return how a step ends whose ranks end so; a step costs `gap_us` on the host."""
        reduced = [rank.reduced_us for rank in ranks]
        if lags:
            reduced = [time_us * lag for time_us, lag in zip(reduced, lags, strict=True)]
        start_us = reduce(np.maximum, reduced)
        longest_us = reduce(np.maximum, [rank.after_start_us for rank in ranks])
        return cls(
            ranks=ranks,
            update_start_us=start_us,
            step_us=start_us + longest_us + gap_us,
            gap_us=gap_us,
            lags=lags,
        )
