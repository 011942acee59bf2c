"""Training reports as the simulator gives them, with pipelines made up."""

import dataclasses

from foretoken.domain.results.report import Feasibility, Percentiles
from foretoken.domain.results.training_report import (
    SPAN_KINDS,
    ComponentTime,
    MemoryColumns,
    SpanColumns,
    StageMemory,
    TrainingReport,
)
from foretoken.domain.units import GIB

Span = tuple[int, int, int, str, float, float]


def span_columns(spans: list[Span]) -> SpanColumns:
    """Return spans of (stage, chunk, micro batch, kind, start, end in ms)."""
    stage, chunk, micro_batch, kind, start, end = zip(*spans, strict=True)
    return SpanColumns(
        stage=stage,
        chunk=chunk,
        micro_batch=micro_batch,
        kind=tuple(SPAN_KINDS.index(name) for name in kind),
        start_ms=start,
        end_ms=end,
    )


def build_spans(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> SpanColumns:
    """Return a pipeline in which stages take 9 ms a pass and start 10 ms after each other."""
    spans: list[Span] = []
    turn = 0
    for micro_batch in range(num_micro_batches):
        for place in range(num_chunks):
            for stage in range(num_stages):
                chunk = place * num_stages + stage
                start = 40.0 * turn + 10.0 * stage
                spans += [
                    (stage, chunk, micro_batch, "forward", start, start + 9),
                    (stage, chunk, micro_batch, "send_forward", start + 9, start + 10),
                    (stage, chunk, micro_batch, "backward", start + 20, start + 29),
                ]
            turn += 1
    end = 40.0 * turn
    for stage in range(num_stages):
        begin = end + 10.0 * stage
        spans += [
            # Half of the reduction runs during the last backward pass.
            (stage, -1, -1, "gradient_reduction", begin - 15, begin - 7),
            (stage, -1, -1, "optimizer", begin, begin + 10),
        ]
    return span_columns(sorted(spans, key=lambda span: (span[0], span[4])))


def build_training(
    num_micro_batches: int = 2, num_stages: int = 2, num_chunks: int = 1
) -> TrainingReport:
    """Return a report of as many stages, with a pipeline of `build_spans`."""
    spans = build_spans(num_stages, num_micro_batches, num_chunks)
    end = 40.0 * num_micro_batches * num_chunks
    stage = StageMemory(
        stage=0,
        weights_bytes=2 * GIB,
        gradients_bytes=4 * GIB,
        optimizer_bytes=12 * GIB,
        activations_bytes=9 * GIB,
        temporary_bytes=1 * GIB,
        reserved_bytes=30 * GIB,
        device_bytes=80 * GIB,
        peak_ms=21.0,
        num_in_flight=2,
        largest="activations",
    )
    times = {"encoder_fwd": (1.5, 12), "encoder_bwd": (3.0, 12), "optimizer": (10.0, 1)}
    return TrainingReport(
        step_time_ms=end + 10,
        step_time_raw_ms=0.9 * (end + 10),
        step_time_low_ms=0.8 * (end + 10),
        step_time_high_ms=1.3 * (end + 10),
        step_spread_ms=Percentiles(mean=end + 11, p50=end + 10, p90=end + 13, p99=end + 17),
        mfu_ratio=0.412,
        hfu_ratio=0.523,
        bubble_ratio=0.11,
        exposed_communication_ratio=0.04,
        tokens_per_s=98765.0,
        tokens_per_s_per_gpu=49382.5,
        num_devices=2,
        num_micro_batches=num_micro_batches,
        step_time_ms_by_group={"gemm": 60.0, "optimizer": 10.0, "bubble": max(end - 60, 0.0)},
        step_time_ratio_by_provenance={"analytical": 1.0},
        communication_ms_by_axis={"tp": 9.0, "dp": 8.0},
        exposed_ms_by_axis={"tp": 9.0, "dp": 2.0},
        components=tuple(
            ComponentTime(name=name, stage=number, time_ms=time_ms, num_calls=calls)
            for number in range(num_stages)
            for name, (time_ms, calls) in times.items()
        ),
        memory=tuple(
            dataclasses.replace(stage, stage=number, activations_bytes=(9 - 4 * (number % 2)) * GIB)
            for number in range(num_stages)
        ),
        device_memory_bytes=80 * GIB,
        spans=spans,
        memory_timeline=MemoryColumns(
            stage=tuple(number for number in range(num_stages) for _ in range(3)),
            time_ms=(0.0, 20.0, 40.0) * num_stages,
            bytes=(18.0 * GIB, 28.0 * GIB, 19.0 * GIB) * num_stages,
        ),
        notes=("No measurements of this interconnect.",),
        scenario_json='{"name": "pretraining", "device": "a100", "layout": {"tp": 2, "dp": 1}}',
    )


def infeasible_training() -> TrainingReport:
    """Return a report of a layout that cannot cut the model."""
    feasibility = Feasibility(is_feasible=False, reason="3 does not divide the 32 heads")
    return TrainingReport(feasibility=feasibility)
