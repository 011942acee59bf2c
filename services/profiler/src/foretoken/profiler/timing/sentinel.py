"""Time the same work again and again during a run: when it changes, the machine has changed."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import torch

from foretoken.profiler.kernel import PreparedCase, TensorFactory
from foretoken.profiler.timing.case import Rig, time_prepared
from foretoken.profiler.timing.self_test import copy_case

_CPU_PERIOD_S, _CUDA_PERIOD_S = 5.0, 10.0
# How far each piece of work may be from its first timing. A GPU has its memory to itself, but its
# clock in a GEMM follows heat and the power that is left. A CPU shares its memory with all other
# cores, and on a virtual machine with other guests.
# docs/explanation/timing.md shows the measurements behind the CPU's.
_CPU_DRIFT_RATIOS = {"gemm": 0.10, "copy": 0.40}
_CUDA_DRIFT_RATIOS = {"gemm": 0.10, "copy": 0.05}

# Where the median counts, there is one from the start.
_NUM_FIRST_TIMINGS = 3

_CPU_GEMM_SIZE, _CUDA_GEMM_SIZE = 256, 4096
_CPU_COPY_BYTES, _CUDA_COPY_BYTES = 2**24, 2**27


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """How far each piece of work was from its reference, over that; positive is slower."""

    now_s: float
    drifts: Mapping[str, float]

    def excess(self, drift_ratios_max: Mapping[str, float]) -> float:
        """Return the largest drift over what it may be; above 1 the machine has changed."""
        ratios = [abs(drift) / drift_ratios_max[name] for name, drift in self.drifts.items()]
        return max(ratios, default=0.0)


@dataclass(slots=True)
class Sentinel:
    """Repeats a GEMM and a copy; `open` times them for the first time.

    `drift_ratios_max` is how far each may be from that. With `follows_run` it is compared with the
    median of all timings so far: of a machine that is never quiet, one moment says little. `checks`
    are those made so far.
    """

    rig: Rig
    cases: Mapping[str, PreparedCase]
    period_s: float
    drift_ratios_max: Mapping[str, float]
    follows_run: bool = False
    checks: list[Drift] = field(default_factory=list)
    _times_us: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _last_s: float = 0.0

    def open(self) -> None:
        """Time the work that later checks are compared with.

        Raises:
            RuntimeError: the device does not answer.

        """
        for _ in range(_NUM_FIRST_TIMINGS if self.follows_run else 1):
            self._time()
        self._last_s = self.rig.stopwatch.now_s()

    def is_due(self, now_s: float) -> bool:
        """Return whether the last look is long enough ago."""
        return now_s - self._last_s >= self.period_s

    def check(self, now_s: float) -> list[str]:
        """Time the work again, and return the flags of all rows timed since the last good check.

        Drift must show twice in a row: one look may itself have been disturbed.

        Raises:
            RuntimeError: the device does not answer.

        """
        found = self._look(now_s)
        if self._excess(found) > 1.0:
            found = min(found, self._look(now_s), key=self._excess)
        self.checks.append(found)
        self._last_s = self.rig.stopwatch.now_s()
        if self._excess(found) <= 1.0:
            return []
        drifts = ", ".join(f"{name} {drift:+.1%}" for name, drift in found.drifts.items())
        since = "from the run's median" if self.follows_run else "since the start of the run"
        return [f"drift: {drifts} {since}"]

    def summary(self) -> dict[str, str]:
        """Return what the checks found, as entries of a run's report."""
        worst = {
            name: max((check.drifts[name] for check in self.checks), key=abs, default=0.0)
            for name in self.cases
        }
        return {
            "sentinel_checks": str(len(self.checks)),
            **{f"sentinel_drift_max_{name}": f"{drift:+.4f}" for name, drift in worst.items()},
        }

    def _excess(self, check: Drift) -> float:
        return check.excess(self.drift_ratios_max)

    def _look(self, now_s: float) -> Drift:
        self._time()
        drifts = {
            name: times_us[-1] / (median(times_us) if self.follows_run else times_us[0]) - 1.0
            for name, times_us in self._times_us.items()
        }
        return Drift(now_s=now_s, drifts=drifts)

    def _time(self) -> None:
        with torch.cuda.stream(self.rig.stream):
            for name, case in self.cases.items():
                summary, _, _ = time_prepared(case, ("sentinel", name), self.rig)
                self._times_us[name].append(summary.latency_us_median)


def open_sentinel(rig: Rig, seed: int, period_s: float = 0.0) -> Sentinel:
    """Return a sentinel that has timed its work once; a period of 0 is that of its device.

    Raises:
        RuntimeError: the device does not answer.

    """
    is_cuda = rig.device.is_cuda
    with torch.cuda.stream(rig.stream):
        cases = {
            "gemm": _gemm_case(rig, _CUDA_GEMM_SIZE if is_cuda else _CPU_GEMM_SIZE, seed),
            "copy": copy_case(rig, _CUDA_COPY_BYTES if is_cuda else _CPU_COPY_BYTES, seed),
        }
    sentinel = Sentinel(
        rig=rig,
        cases=cases,
        period_s=period_s or (_CUDA_PERIOD_S if is_cuda else _CPU_PERIOD_S),
        drift_ratios_max=_CUDA_DRIFT_RATIOS if is_cuda else _CPU_DRIFT_RATIOS,
        follows_run=not is_cuda,
    )
    sentinel.open()
    return sentinel


def _gemm_case(rig: Rig, size: int, seed: int) -> PreparedCase:
    dtype = torch.bfloat16 if rig.device.is_cuda else torch.float32
    tensors = TensorFactory(rig.device.torch_device, dtype, seed)
    left, right = tensors.random(size, size), tensors.random(size, size)
    return PreparedCase(
        call=lambda _: torch.mm(left, right),
        input_bytes=left.nbytes + right.nbytes,
        num_input_sets=1,
        source="torch.mm",
    )
