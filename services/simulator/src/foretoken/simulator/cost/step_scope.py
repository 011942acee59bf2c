"""What a model of whole steps holds for, and the tables it makes."""

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.step_model import STEP_KINDS, StepModel
from foretoken.domain.models.image import IMAGE_KINDS
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.cost.surface import SurfaceSpec
from foretoken.simulator.grid import Floats

# No step is stretched.
AS_ESTIMATED = np.array([[1.0, 0.0]] * len(STEP_KINDS))


def scope_of(spec: SurfaceSpec) -> dict[str, str]:
    """Return what steps were recorded of, besides the device, as `StepModel` names it.

    Raises:
        InvalidRequestError: steps of such engines are not one time each.

    """
    lacks = {
        "layout.pp": spec.layout.pp > 1,
        "layout.dp": spec.layout.dp > 1,
        "speculative": spec.rows_per_seq > 1,
        "workload.images": spec.images is not None and spec.images.kind in IMAGE_KINDS,
        "workload.sound": spec.images is not None and spec.images.kind not in IMAGE_KINDS,
        "engine.ffn_devices": spec.micro_batches > 0,
    }
    found = [name for name, is_lack in lacks.items() if is_lack]
    if found:
        reason = (
            "whole steps are corrected of engines on one stage that run on their own, with text"
        )
        raise InvalidRequestError.of_field(found[0], reason)
    return {
        "model": spec.model.name,
        "engine": spec.software or spec.engine,
        "topology": spec.topology,
        "layout": say_layout(spec.layout),
    }


def say_layout(layout: ParallelLayout) -> str:
    """Return the degrees of an engine above 1."""
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    return " ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)


def check_scope(steps: StepModel, spec: SurfaceSpec) -> None:
    """Refuse a model of steps that was learned of something else.

    Raises:
        InvalidRequestError: says what differs.

    """
    for name, value in scope_of(spec).items():
        learned = getattr(steps, name)
        if learned != value:
            reason = (
                f"was learned of {name} {learned or 'default'!r}, not of {value or 'default'!r}"
            )
            raise InvalidRequestError.of_field("correction", reason)


def stretch_of(steps: StepModel | None) -> Floats:
    """Return what steps are multiplied with and what is added, by `STEP_KINDS`."""
    return _by_kind(steps, "ratio", "constant_us", AS_ESTIMATED)


def bounds_of(steps: StepModel | None) -> Floats:
    """Return the least and the most that a step takes of what it is predicted, by `STEP_KINDS`."""
    return _by_kind(steps, "low_ratio", "high_ratio", np.ones_like(AS_ESTIMATED))


def _by_kind(steps: StepModel | None, first: str, second: str, unknown: Floats) -> Floats:
    """Return two fields of what is known of every kind of step: (kind, field)."""
    found = [steps.find(kind) if steps is not None else None for kind in STEP_KINDS]
    return np.array(
        [
            row if known is None else (getattr(known, first), getattr(known, second))
            for known, row in zip(found, unknown, strict=True)
        ]
    )
