"""The spans of a step: its pipeline, and what follows it."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.results.training_report import SPAN_KINDS, SpanColumns
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.training.accounting import value
from foretoken.simulator.training.composition import ComposedStep

# Stage, kind, start and end in µs.
_Span = tuple[int, str, float, float]


def draw_spans(composed: ComposedStep) -> SpanColumns:
    """Return what every rank did when, in the order of ranks and times, at the estimate.

    What a pass communicates during its computation is one span, from the start of the pass.
    """
    run, factor = composed.run.spans, value(composed.factor) / US_PER_MS
    beside_us = _exchanged(composed)
    has_exchange = beside_us > 0
    after = [span for span in _after_pipeline(composed) if span[3] > span[2]]
    outside = np.full(len(after), -1)
    exchange = np.full(int(has_exchange.sum()), SPAN_KINDS.index("exchange"))
    kinds = np.array([SPAN_KINDS.index(span[1]) for span in after], dtype=np.int64)
    begun_us = run.start_us[has_exchange]
    stages = np.array([span[0] for span in after], dtype=np.int64)
    stage = np.concatenate([run.stage, run.stage[has_exchange], stages])
    begins, ends = (np.array([span[at] for span in after], dtype=np.float64) for at in (2, 3))
    start = np.concatenate([run.start_us, begun_us, begins])
    end = np.concatenate([run.end_us, begun_us + beside_us[has_exchange], ends])
    order = np.lexsort((start, stage))
    return SpanColumns(
        stage=stage[order],
        chunk=np.concatenate([run.chunk, run.chunk[has_exchange], outside])[order],
        micro_batch=np.concatenate([run.micro_batch, run.micro_batch[has_exchange], outside])[
            order
        ],
        kind=np.concatenate([run.kind, exchange, kinds])[order],
        start_ms=start[order] * factor,
        end_ms=end[order] * factor,
    )


def _exchanged(composed: ComposedStep) -> NDArray[np.float64]:
    """Return what each span of the pipeline communicates during its computation, in µs."""
    spans = composed.run.spans
    by_pass = np.zeros((len(SPAN_KINDS), len(composed.passes)))
    for chunk, passes in enumerate(composed.passes):
        for kind in ("forward", "backward", "backward_input", "backward_weight"):
            time = passes.of_kind(kind)
            beside_us = np.minimum(time.hidden_us, time.total_us)
            by_pass[SPAN_KINDS.index(kind), chunk] = value(beside_us)
    found: NDArray[np.float64] = by_pass[spans.kind, spans.chunk]
    return found


def _after_pipeline(composed: ComposedStep) -> Iterator[_Span]:
    end = composed.end
    update_start_us, gap_us = value(end.update_start_us), value(end.gap_us)
    step_us = value(end.step_us)
    for stage, rank in enumerate(end.ranks):
        reduced_us = value(rank.reduced_us)
        yield stage, "gradient_reduction", value(rank.reduction_start_us), reduced_us
        updated_us = update_start_us + value(rank.work.check_us) + value(rank.work.update_us)
        yield stage, "optimizer", update_start_us, updated_us
        yield stage, "parameter_gather", updated_us, updated_us + value(rank.exposed_gather_us)
        yield stage, "host", step_us - gap_us, step_us
