"""Measured training steps: whole steps and their components."""

import statistics
from dataclasses import dataclass

import numpy as np

ALL_STAGES = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredComponent:
    """A component on one stage as measured; a stage of -1 stands for all.

    `time_ms` is what a simulation is compared with. `samples_ms` are single steps' values where
    they are known, `mean_ms` the mean over all steps that were recorded. What is doubtful of it is
    in `flags`: a flagged component is shown, and never scored.
    """

    name: str
    stage: int
    time_ms: float
    mean_ms: float
    samples_ms: tuple[float, ...] = ()
    flags: str = ""

    @property
    def variation_ratio(self) -> float:
        """Coefficient of variation over steps: standard deviation over mean; 0 of less than two."""
        if len(self.samples_ms) < 2:  # noqa: PLR2004  one value does not vary
            return 0.0
        return statistics.stdev(self.samples_ms) / statistics.fmean(self.samples_ms)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the samples, linear between ranks; 0 where there are none."""
        return float(np.percentile(self.samples_ms, percent)) if self.samples_ms else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTraining:
    """What was measured of one configuration. `num_flagged_steps` are not in `step`."""

    name: str
    source: str
    step: MeasuredComponent
    components: tuple[MeasuredComponent, ...] = ()
    num_flagged_steps: int = 0
