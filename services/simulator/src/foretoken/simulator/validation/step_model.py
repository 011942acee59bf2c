"""What a decode step costs by what is in it, fitted to samples of a run."""

from dataclasses import dataclass

import numpy as np

from foretoken.simulator.validation.load import DecodeSamples
from foretoken.simulator.validation.timing import Floats

# Fewer samples than this tell no slope from another.
_MIN_SAMPLES = 12
# Iterations and width (in medians of the absolute deviation) of the robust fit.
# Source: Huber, "Robust Statistics", 1981: 1.345 standard deviations, and 1.4826 to scale.
_ROUNDS = 20
_HUBER_WIDTH = 1.345 * 1.4826

FEATURES = ("batch", "context_tokens", "prefill_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """Milliseconds of a step: a constant, and per request, context token and prompt token."""

    constant_ms: float
    ms_per_batch: float
    ms_per_context_token: float
    ms_per_prefill_token: float

    def predict_ms(self, samples: DecodeSamples) -> Floats:
        """Return the cost of each stretch's mean step."""
        return np.asarray(
            self.constant_ms
            + self.ms_per_batch * samples.batch
            + self.ms_per_context_token * samples.context_tokens
            + self.ms_per_prefill_token * samples.prefill_tokens
        )


def fit_steps(samples: DecodeSamples) -> StepModel:
    """Fit a model whose slopes are not negative; a constant where the samples are too few."""
    design = np.column_stack(
        [np.ones(samples.num_samples)] + [getattr(samples, f) for f in FEATURES]
    )
    active = [0, 1, 2, 3] if samples.num_samples >= _MIN_SAMPLES else [0]
    while True:
        solution = fit_robust(design[:, active], samples.gap_ms, samples.weight)
        worst = int(np.argmin(solution))
        if active[worst] == 0 or solution[worst] >= 0:
            break
        del active[worst]
    values = np.zeros(4)
    values[active] = solution
    return StepModel(
        constant_ms=float(values[0]),
        ms_per_batch=float(values[1]),
        ms_per_context_token=float(values[2]),
        ms_per_prefill_token=float(values[3]),
    )


def fit_robust(design: Floats, target: Floats, weight: Floats) -> Floats:
    """Return the coefficients that fit best, outliers counting less (Huber).

    Columns that do not vary beside another, or are zero, get what a slight ridge gives them.
    """
    scale = np.sqrt(np.mean(design**2, axis=0))
    scale[scale == 0] = 1.0
    scaled = design / scale
    trust = np.ones(len(target))
    solution = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        row_weight = weight * trust
        gram = scaled.T @ (scaled * row_weight[:, None])
        ridge = 1e-6 * np.trace(gram) / len(gram) * np.eye(len(gram))
        solution = np.linalg.solve(gram + ridge, scaled.T @ (row_weight * target))
        residual = np.abs(target - scaled @ solution)
        width = _HUBER_WIDTH * float(np.median(residual))
        if width == 0.0:
            break
        trust = np.minimum(1.0, width / np.maximum(residual, width * 1e-9))
    return np.asarray(solution / scale)
