"""What a pipeline schedule is: in which order each stage works through the micro batches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.plugins import scan_modules

PassKind = Literal["forward", "backward"]
# The passes of one stage, in order: (kind, micro batch).
StageOrder = tuple[tuple[PassKind, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """A plug-in of `pipeline_schedules/`.

    `orders(num_stages, num_micro_batches)` returns the order of every stage, the first one first.
    """

    name: str
    orders: Callable[[int, int], tuple[StageOrder, ...]]


@cache
def all_schedules() -> dict[str, PipelineSchedule]:
    """Return every schedule by name: one file each in `pipeline_schedules/`."""
    found = scan_modules("foretoken.simulator.training.pipeline_schedules", "SCHEDULE")
    return {schedule.name: schedule for schedule in found.values()}


def find_schedule(name: str) -> PipelineSchedule:
    """Return the schedule of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    return UnknownPluginError.look_up(name, all_schedules())


def count_in_flight(order: StageOrder) -> int:
    """Return the most micro batches whose activations a stage holds at once."""
    held = peak = 0
    for kind, _ in order:
        held += 1 if kind == "forward" else -1
        peak = max(peak, held)
    return peak
