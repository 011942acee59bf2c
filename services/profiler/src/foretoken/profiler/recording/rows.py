"""Turn timings into rows of the measurement schema."""

from typing import Any

from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.profiler.environment import DeviceReading
from foretoken.profiler.recording.spool import Row
from foretoken.profiler.timing.timer import TimingSummary

_LONGEST_REASON = 300


class RowBuilder:
    """Fills in what all rows of a run share."""

    def __init__(self, device: str, framework: str, framework_version: str) -> None:
        """Name the device and the software that is timed."""
        self._shared = {
            "device": device,
            "framework": framework,
            "framework_version": framework_version,
        }

    def measured(
        self, call: OperatorCall, kernel: str, summary: TimingSummary, **optional: Any
    ) -> Row:
        """Return the row of a timed call; `optional` are further columns."""
        return {
            **self._of_call(call, kernel),
            "latency_us_median": summary.latency_us_median,
            "latency_us_mean": summary.latency_us_mean,
            "latency_us_min": summary.latency_us_min,
            "latency_us_max": summary.latency_us_max,
            "latency_us_std": summary.latency_us_std,
            "latency_us_p10": summary.latency_us_p10,
            "latency_us_p90": summary.latency_us_p90,
            "num_samples": summary.num_samples,
            "status": "ok",
            **optional,
        }

    def failed(self, call: OperatorCall, kernel: str, reason: str, **optional: Any) -> Row:
        """Return the row of a call that could not be timed."""
        return {
            **self._of_call(call, kernel),
            "status": "failed",
            "status_reason": reason[:_LONGEST_REASON],
            **optional,
        }

    def _of_call(self, call: OperatorCall, kernel: str) -> dict[str, Any]:
        return {
            **self._shared,
            "operator": call.operator,
            "phase": call.phase.name.lower(),
            "dtype": call.dtype.name.lower(),
            "dims": dict(call.dims),
            "kernel": kernel,
            "variant": call.variant or None,
            "flags": [],
        }


def reading_columns(reading: DeviceReading) -> dict[str, float | str | None]:
    """Return the columns of a device reading."""
    return {
        "power_w": reading.power_w,
        "clock_mhz": reading.clock_mhz,
        "temperature_c": reading.temperature_c,
        "throttle": reading.throttle,
    }
