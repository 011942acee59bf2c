"""What an engine's host takes, moved from the processors that it was measured on to others."""

from collections.abc import Container, Mapping
from typing import Any

# The rules of an engine that are times of its host, one number each.
HOST_TIMES = (
    "host_us",
    "host_us_per_seq",
    "admission_us_per_token",
    "output_us",
    "output_us_per_seq",
    "output_us_per_past_token",
    "launch_us",
    "eager_us",
    "piece_us",
    "product_compile_us",
    "frontend_ms",
    "frontend_us_per_token",
    "executor_us_per_token",
)
# Those that have a number for each kind of something.
HOST_TIMES_BY_KIND = ("compile_us", "expert_call_us")


def scale_host_times(
    rules: Mapping[str, Any], ratio: float, kept: Container[str]
) -> dict[str, Any]:
    """Return an engine's host times, `ratio` times as long; those `kept` are as they are."""
    scaled = {name: ratio * rules[name] for name in HOST_TIMES if name not in kept}
    return scaled | {
        name: {kind: ratio * us for kind, us in rules[name].items()}
        for name in HOST_TIMES_BY_KIND
        if name not in kept
    }
