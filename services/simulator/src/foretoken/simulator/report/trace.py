"""The pipeline of a training step as a trace for Perfetto or chrome://tracing."""

from typing import Any

from foretoken.domain.report import TrainingReport
from foretoken.domain.units import US_PER_MS


def chrome_trace(report: TrainingReport) -> dict[str, Any]:
    """Return the trace as JSON data: a thread per stage, and one for what it sends.

    Source: Trace Event Format, complete events ("ph": "X"), times in µs.
    """
    stages = sorted({span.stage for span in report.pipeline})
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 0,
            "tid": 2 * stage + lane,
            "args": {"name": f"stage {stage}{suffix}"},
        }
        for stage in stages
        for lane, suffix in enumerate(("", " sends"))
    ]
    for span in report.pipeline:
        is_send = span.kind.startswith("send")
        name = span.kind if span.micro_batch < 0 else f"{span.kind} {span.micro_batch}"
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": span.kind,
                "pid": 0,
                "tid": 2 * span.stage + int(is_send),
                "ts": span.start_ms * US_PER_MS,
                "dur": (span.end_ms - span.start_ms) * US_PER_MS,
                "args": {"micro_batch": span.micro_batch},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
