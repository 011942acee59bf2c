"""When the ranks of a pipeline end their passes: by the formula of a schedule, or run in columns.

Formulas take the stages of a pipeline to be alike. Where they are not, the event simulator runs the
schedule for all cases at once, of many micro batches some: every round more is taken to add as much
as the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from foretoken.simulator.steps.pipelines.events import ChunkTimes, LinkRules, Pipeline, Time
from foretoken.simulator.steps.pipelines.formulas import PipelineShape, estimate_rank_ends_us
from foretoken.simulator.steps.pipelines.schedule import find_schedule

# Micro batches for each stage after which every one more takes as long.
_NUM_ROUNDS = 10


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PipelineEnds:
    """When ranks end their passes and begin the last backward pass of each chunk, in µs.

    By rank, and by chunk; `held_us` is how long transfers hold each rank. Of a formula the ends
    alone are known.
    """

    ends_us: Sequence[Time]
    starts_us: Sequence[Time] = ()
    held_us: Sequence[Time] = ()

    @classmethod
    def of_shape(cls, schedule: str, shape: PipelineShape, *, is_mixed: bool) -> "PipelineEnds":
        """Return the ends of a pipeline; those of mixed stages have one number of micro batches."""
        if not is_mixed:
            return cls(ends_us=estimate_rank_ends_us(schedule, shape))
        count = int(np.max(shape.num_micro_batches))
        some, many = _NUM_ROUNDS * shape.num_ranks, (_NUM_ROUNDS + 1) * shape.num_ranks
        if count <= many:
            return _run(schedule, shape, count)
        few, more = _run(schedule, shape, some), _run(schedule, shape, many)
        rounds = (count - many) / shape.num_ranks
        return cls(
            **{
                item.name: [
                    later + rounds * (later - sooner)
                    for sooner, later in zip(
                        getattr(few, item.name), getattr(more, item.name), strict=True
                    )
                ]
                for item in fields(cls)
            }
        )


def _run(schedule: str, shape: PipelineShape, num_micro_batches: int) -> PipelineEnds:
    rounds = len(shape.chunk_times) // shape.num_ranks
    pipeline = _build(schedule, (shape.num_ranks, num_micro_batches, rounds), shape.rules)
    wide = np.shape(shape.chunk_times[0].forward_us)
    run = pipeline.run([_flatten(times, wide) for times in shape.chunk_times])
    found = run.rank_ends_us, run.last_backward_start_us, run.transfers_us
    ends, starts, held = ([np.reshape(time, wide) for time in times] for times in found)
    return PipelineEnds(ends_us=ends, starts_us=starts, held_us=held)


def _flatten(times: ChunkTimes, shape: tuple[int, ...]) -> ChunkTimes:
    """Return times as one column, of all variants and cases."""
    columns: Any = {
        name: np.broadcast_to(getattr(times, name), shape).ravel()
        for name in (
            *("forward_us", "backward_input_us", "backward_weight_us", "send_forward_us"),
            *("send_backward_us", "first_backward_us", "last_backward_us"),
        )
    }
    return replace(times, **columns)


@lru_cache(maxsize=64)
def _build(schedule: str, numbers: tuple[int, int, int], rules: LinkRules) -> Pipeline:
    """Return a pipeline of so many ranks, micro batches, and chunks per rank."""
    return Pipeline(find_schedule(schedule).orders(*numbers), rules)
