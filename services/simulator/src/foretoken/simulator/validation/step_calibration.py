"""What an engine's own records of its steps say of how long steps take.

Each recorded step is priced as the scenario's engine would run it. Of every kind of step is learned
by what to multiply that, and what to add. What the host takes of a step of an engine that does not
schedule ahead is taken as given, as the simulation adds it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.correction import Correction, CorrectionRequest
from foretoken.domain.measurements.step_model import STEP_KINDS, StepKindModel, StepModel
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.units import US_PER_S
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces, surface_spec
from foretoken.simulator.cost.step_scope import scope_of
from foretoken.simulator.cost.tables import StepShape
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.serving.record import StepRecord
from foretoken.simulator.serving.step_cost import SurfaceCost
from foretoken.simulator.validation.decode_steps import fit_robust
from foretoken.simulator.validation.measured_steps import EngineStep, StepRun

# Fewer steps do not show what one in twenty takes at either end.
_MIN_STEPS = 20
# Steps in a row are alike, so they are left out in as many runs of neighbours.
_NUM_FOLDS = 5
# Share of steps that should take what the bounds say.
_NOMINAL = 0.9
# How many times slower or faster than estimated a step may be said to be. Source: measured
# operators take 1 to 5 times their roofline; what is further off is another server's.
_MAX_APART_RATIO = 5.0
# Left-out steps further off than half of what they take are explained by nothing that was learned.
_MAX_ERROR_RATIO = 0.5


class StepSource(LatencySource, Protocol):
    """What prices operators and keeps corrections; any predictor does."""

    def create_correction(self, request: CorrectionRequest) -> Correction:
        """Keep a correction under its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCalibration:
    """What was learned of steps, kept as a correction; `notes` say what could not be learned."""

    scenario: ServingScenario
    correction: Correction
    steps: StepModel
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    """Steps of one kind in µs: measured, what the host adds, and what the rest is estimated at."""

    measured_us: Floats
    host_us: Floats
    raw_us: Floats

    @property
    def device_us(self) -> Floats:
        """What is left for the device of the measured times."""
        return self.measured_us - self.host_us

    def keep(self, mask: Flags) -> "_Steps":
        """Return the steps where the mask is true."""
        return _Steps(**{name: getattr(self, name)[mask] for name in self.__slots__})


def calibrate_steps(
    run: StepRun, scenario: ServingScenario, name: str, predictor: StepSource
) -> StepCalibration:
    """Learn a model of whole steps from records of them, and keep it under a name.

    Raises:
        InvalidRequestError: a correction is in use already, the steps are not those of the
            scenario's engine, or too few.
        ForetokenError: whatever the predictor raises.

    """
    if scenario.correction:
        raise InvalidRequestError.of_field("correction", "is to be learned: leave it out")
    _check_limits(run.steps, scenario)
    longest = max(max(s.decode_kv_tokens_max, _mean_end(s)) for s in run.steps)
    spec = surface_spec(scenario, longest)
    scope = scope_of(spec)
    cost = SurfaceCost(fetch_surfaces(spec, predictor))
    by_kind = _price(run.steps, scenario, cost)
    kinds = [
        _learn(kind, steps) for kind, steps in by_kind.items() if len(steps.raw_us) >= _MIN_STEPS
    ]
    seen = {kind: len(steps.raw_us) for kind, steps in by_kind.items()}
    said = ", ".join(f"{count} {kind}" for kind, count in seen.items())
    if not kinds:
        reason = f"needs at least {_MIN_STEPS} steps of a kind; has {said}"
        raise InvalidRequestError.of_field("--steps", reason)
    steps = StepModel(**scope, source=run.source, kinds=tuple(kinds))
    correction = predictor.create_correction(
        CorrectionRequest(
            name=name,
            device=scenario.device,
            topology=scenario.topology,
            framework=scenario.framework,
            observations=(),
            steps=steps,
        )
    )
    return StepCalibration(
        scenario=replace(scenario, correction=name),
        correction=correction,
        steps=steps,
        notes=tuple(_notes(steps, seen)),
    )


def _check_limits(steps: Sequence[EngineStep], scenario: ServingScenario) -> None:
    """Refuse steps that the scenario's engine never has: it is not the one that was recorded."""
    engine = scenario.resolve_engine()
    most = {
        "max_num_batched_tokens": max(step.num_tokens for step in steps),
        "max_num_seqs": max(step.num_decodes + step.num_prefills for step in steps),
    }
    for name, found in most.items():
        limit = getattr(engine, name)
        if found > limit:
            reason = f"is {limit}, and a recorded step has {found}: set it as the server has it"
            raise InvalidRequestError.of_field(f"engine.{name}", reason)


def _mean_end(step: EngineStep) -> int:
    """Return the context of a mean prompt of a step after it."""
    count = max(step.num_prefills, 1)
    return -(-(step.prefill_tokens + step.prefill_kv_tokens) // count)


def _price(
    steps: Sequence[EngineStep], scenario: ServingScenario, cost: SurfaceCost
) -> dict[str, _Steps]:
    """Return the steps by kind, with what they are estimated to take."""
    raw_us = np.sum(list(cost.breakdown(record_steps(steps)).values()), axis=0)
    engine = scenario.resolve_engine()
    num_seqs = np.array([step.num_decodes + step.num_prefills for step in steps])
    host_us = np.zeros(len(steps))
    if not engine.has_async_scheduling:
        host_us += engine.host_us + engine.output_us + engine.host_us_per_seq * num_seqs
    whole = _Steps(
        measured_us=np.array([step.duration_s for step in steps]) * US_PER_S,
        host_us=host_us,
        raw_us=raw_us,
    )
    kind = np.array([step.kind for step in steps])
    # What the host alone takes longer than was measured of no device.
    is_usable = (whole.device_us > 0) & (raw_us > 0)
    return {name: whole.keep((kind == name) & is_usable) for name in STEP_KINDS}


def record_steps(steps: Sequence[EngineStep]) -> StepRecord:
    """Return steps as a simulation records its own.

    Prompts of a step are taken to be alike, and each to get a token.
    """
    owner = np.repeat(np.arange(len(steps)), [step.num_prefills for step in steps])
    shapes = [
        StepShape(
            num_tokens=step.num_tokens,
            num_rows=step.num_decodes + step.num_prefills,
            num_decodes=step.num_decodes,
            decode_kv_tokens=step.decode_kv_tokens,
            decode_kv_tokens_max=step.decode_kv_tokens_max,
            num_prefills=step.num_prefills,
        )
        for step in steps
    ]
    columns = {
        name: np.array([getattr(shape, name) for shape in shapes], dtype=np.int64)
        for name in StepShape._fields
    }
    others = (
        *("scheduled_ns", "start_ns", "end_ns"),
        *("num_running", "num_waiting", "num_used_blocks", "num_preempted"),
    )
    zeros = np.zeros(len(steps), dtype=np.int64)
    each = [(s.prefill_tokens, s.prefill_kv_tokens, max(s.num_prefills, 1)) for s in steps]
    tokens, context, count = np.array(each, dtype=np.int64).T
    return StepRecord(
        **columns,
        **dict.fromkeys(others, zeros),
        prefill_step=owner,
        prefill_request=owner,
        prefill_tokens=np.maximum(np.rint(tokens / count), 1).astype(np.int64)[owner],
        prefill_context=np.rint(context / count).astype(np.int64)[owner],
    )


# Return by what to multiply estimates and what to add, of steps.
_Fit = Callable[[_Steps], tuple[float, float]]


def _as_estimated(_: _Steps) -> tuple[float, float]:
    return 1.0, 0.0


def _fit_ratio(steps: _Steps) -> tuple[float, float]:
    return float(np.exp(np.median(np.log(steps.device_us / steps.raw_us)))), 0.0


def _fit_line(steps: _Steps) -> tuple[float, float]:
    """Return both, by least relative errors of which outliers count less; none is negative."""
    design = np.column_stack([steps.raw_us, np.ones(len(steps.raw_us))])
    ones = np.ones(len(steps.raw_us))
    found = fit_robust(design / steps.device_us[:, np.newaxis], ones, ones)
    ratio, constant_us = found.tolist()
    return (ratio, constant_us) if ratio > 0 and constant_us >= 0 else _fit_ratio(steps)


def _learn(kind: str, steps: _Steps) -> StepKindModel:
    """Return what is learned of the steps of a kind: the least that does clearly best.

    Clearly is by the share that a mean over so many is uncertain by, one over their root. The
    bounds are of steps left out. Source: cross-conformal prediction (Vovk, 2015).

    Raises:
        InvalidRequestError: nothing explains the steps.

    """
    chosen: _Fit = _as_estimated
    left_out_us = steps.raw_us
    least_gain_ratio = len(steps.raw_us) ** -0.5
    for fit in (_fit_ratio, _fit_line):
        found_us = _leave_out(steps, fit)
        least = _mean_error(steps, left_out_us) * (1.0 - least_gain_ratio)
        if _mean_error(steps, found_us) < least:
            chosen, left_out_us = fit, found_us
    ratio, constant_us = chosen(steps)
    model_us = ratio * steps.raw_us + constant_us
    left_out_error = _mean_error(steps, left_out_us)
    _check_fit(kind, float(np.median(model_us / steps.raw_us)), left_out_error)
    low, high = _bounds(np.log(steps.device_us / left_out_us))
    return StepKindModel(
        kind=kind,
        num_steps=len(steps.raw_us),
        ratio=ratio,
        constant_us=constant_us,
        low_ratio=low,
        high_ratio=high,
        measured_us=float(steps.measured_us.mean()),
        raw_us=float((steps.raw_us + steps.host_us).mean()),
        corrected_us=float((model_us + steps.host_us).mean()),
        raw_error_ratio=_mean_error(steps, steps.raw_us),
        corrected_error_ratio=_mean_error(steps, model_us),
        left_out_error_ratio=left_out_error,
    )


def _check_fit(kind: str, apart_ratio: float, error_ratio: float) -> None:
    if not 1 / _MAX_APART_RATIO <= apart_ratio <= _MAX_APART_RATIO:
        problem = f"take {apart_ratio:.3g} times what they are estimated to take"
    elif error_ratio > _MAX_ERROR_RATIO:
        problem = f"are {error_ratio:.0%} off whatever is learned from the others"
    else:
        return
    reason = f"{kind} steps {problem}: are they of the scenario's model, device and engine?"
    raise InvalidRequestError.of_field("--steps", reason)


def _leave_out(steps: _Steps, fit: _Fit) -> Floats:
    """Return what each step is predicted from those far from it in time."""
    fold = np.arange(len(steps.raw_us)) * _NUM_FOLDS // len(steps.raw_us)
    left_out_us = np.empty(len(fold))
    for number in range(_NUM_FOLDS):
        ratio, constant_us = fit(steps.keep(fold != number))
        left_out_us[fold == number] = ratio * steps.raw_us[fold == number] + constant_us
    return left_out_us


def _mean_error(steps: _Steps, device_us: Floats) -> float:
    return float(np.abs((device_us + steps.host_us) / steps.measured_us - 1.0).mean())


def _bounds(error_log: Floats) -> tuple[float, float]:
    """Return the least and the most of what is predicted that a new step takes; 1 is inside."""
    count = len(error_log)
    share = min(1.0, (1.0 + _NOMINAL) / 2.0 * (count + 1.0) / count)
    low = float(np.quantile(error_log, 1.0 - share, method="lower"))
    high = float(np.quantile(error_log, share, method="higher"))
    return float(np.exp(min(low, 0.0))), float(np.exp(max(high, 0.0)))


def _notes(steps: StepModel, seen: dict[str, int]) -> list[str]:
    learned = {each.kind for each in steps.kinds}
    notes = []
    for kind in STEP_KINDS:
        if kind in learned:
            continue
        other = steps.find(kind)
        instead = f"they go by what {other.kind} steps say" if other else "they stay as estimated"
        notes.append(f"{seen[kind]} {kind} steps are fewer than {_MIN_STEPS}: {instead}")
    return notes
