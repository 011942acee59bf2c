"""What a pipeline schedule is: a table of what each rank does in which order.

A model is cut into chunks, runs of layers numbered in the order of the model. A rank holds one
chunk or several. Which rank runs a chunk for a micro batch is in the table, so schedules that fold
the pipeline back (zero-bubble V) or feed it from both ends (DualPipe) need no rule of their own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.limit import Limit
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.units import Quantity

# `backward` is both gradients; `backward_input` is what the chunk before waits for,
# `backward_weight` what only the optimizer does.
PassKind = Literal["forward", "backward", "backward_input", "backward_weight"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One chunk of layers run for one micro batch."""

    kind: PassKind
    micro_batch: int
    chunk: int


# Chunk of a forward pass, and kind and chunk of the backward pass it shares a slot with.
PairKey = tuple[int, PassKind, int]
# What a rank does, in order: in each slot one pass, or two that run together and hide each other's
# communication.
RankOrder = tuple[tuple[Pass, ...], ...]


def pair_key(slot: tuple[Pass, ...]) -> PairKey | None:
    """Return what a slot of a forward and a backward pass pairs; None for any other slot."""
    ahead = [item for item in slot if item.kind == "forward"]
    back = [item for item in slot if item.kind != "forward"]
    if len(ahead) != 1 or len(back) != 1:
        return None
    return ahead[0].chunk, back[0].kind, back[0].chunk


def takes_all(_ranks: Quantity, _micro_batches: Quantity, _chunks: Quantity) -> Iterator[Limit]:
    """Yield no limit: a schedule has an order for all numbers."""
    yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """A plug-in of `pipeline_schedules/`.

    `orders(num_ranks, num_micro_batches, virtual_stages)` returns the order of every rank, the one
    with the first layers first; it raises InvalidRequestError where the numbers do not suit.
    `limits` yields which do not, of numbers or of columns of them; without, `orders` is asked.
    `virtual_stages` are the chunks per rank it needs (0: as many as the scenario says).
    `splits_backward` tells that backward passes come in two halves.
    """

    name: str
    orders: Callable[[int, int, int], tuple[RankOrder, ...]]
    virtual_stages: int = 1
    splits_backward: bool = False
    limits: Callable[[Quantity, Quantity, Quantity], Iterator[Limit]] | None = None

    def find_refusal(self, num_ranks: int, num_micro_batches: int, chunks: int) -> str:
        """Return why the numbers do not suit; empty where they do."""
        try:
            self.orders(num_ranks, num_micro_batches, chunks)
        except InvalidRequestError as err:
            return err.message
        return ""


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
    return UnknownPluginError.look_up(
        name, all_schedules(), "pipeline_schedule", "pipeline schedule"
    )


def with_chunks(scenario: TrainingScenario, schedule: PipelineSchedule) -> TrainingScenario:
    """Return the scenario with as many chunks per rank as its schedule needs."""
    return replace(scenario, virtual_stages=schedule.virtual_stages or scenario.virtual_stages)


def order_step(
    scenario: TrainingScenario, schedule: PipelineSchedule, num_micro_batches: int = 0
) -> tuple[RankOrder, ...]:
    """Return the order of every rank, with the scenario's micro batches if no number is given.

    Raises:
        InvalidRequestError: the numbers do not suit the schedule.

    """
    count = num_micro_batches or scenario.num_micro_batches
    return schedule.orders(scenario.layout.pp, count, scenario.virtual_stages)
