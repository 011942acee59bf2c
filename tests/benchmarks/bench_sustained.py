"""How much slower GEMMs are that run for a second than those in bursts, and what the law says.

Run: python tests/benchmarks/bench_sustained.py

Compares tables of the same GEMMs of one engine on one device, timed in bursts and for about a
second each (columns `power`, `power_limit`). Two versions differ by a factor of their own, the
median ratio of calls that are below every limit, and whose product decides what they take. Prints
what is fitted, the share of the peak from which on power slows, next to the device file's, how many
calls it slows, and how far these are off with the law and without it. Then how much of a slowdown
shows in bursts of different length, and the time constant of a first-order response that fits them
best. Last which tables of a B200 are slowed at all, by calls of under a millisecond at half to 0.7
of the peak, compared with vLLM's bursts.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.roofline import RooflineTerms
from foretoken.domain.hardware.sustained import slowed_ratio
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.roofline import Target, compute_limits

_SYSTEMS = Path(__file__).resolve().parents[3] / "shared" / "data" / "aiconfigurator" / "systems"
# Folder of the system, engine, version in bursts, version for long, device.
_PAIRS = (
    ("h200_sxm", "vllm", "0.24.0", "0.22.0", "h200_sxm"),
    ("b200_sxm", "vllm", "0.24.0", "0.22.0", "b200"),
    ("b200_sxm", "trtllm", "1.3.0rc20", "1.3.0rc15", "b200"),
    ("gb200", "vllm", "0.24.0", "0.22.0", "gb200"),
)
_B200_TABLES = (
    ("sglang", "0.5.14"),
    ("trtllm", "1.3.0rc20"),
    ("trtllm", "1.3.0rc15"),
    ("vllm", "0.22.0"),
)
_FORMATS = {
    "bfloat16": DType.BF16,
    "fp8": DType.FP8,
    "fp8_block": DType.FP8,
}
# Calls of these shares of the peak are below every limit and tell by what factor versions differ.
# Of smaller ones launches and conversions of inputs do: a GB200's in FP8 differ by 0.94, these by
# 1.00.
_FREE_RATIOS = (0.1, 0.15)
_SHARES = np.linspace(0.1, 1.0, 91)
# Runs before those that are timed, and with them, of the tables of vLLM's bursts; a run is a launch
# of block formats, else six. Source: AIConfigurator's collectors, `helper.py`
# (`benchmark_with_power`: three runs to warm up, six timed) and `vllm/collect_gemm.py`.
_RUNS_BEFORE, _RUNS = 3, 9
_LAUNCHES_PER_RUN = {"fp8_block": 1}
# Ranges of the slowdown that the law estimates, and ranges of how long bursts are, in ms.
_SLOWDOWNS = ((1.12, 1.2), (1.2, 1.3))
_ENDS_MS = (25, 50, 100, 200, 400, 800, 1e9)
_RESPONSES_MS = np.geomspace(10.0, 5000.0, 60)

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The same calls, in bursts and for long, in µs."""

    label: str
    target: Target
    terms: RooflineTerms
    burst_us: _Floats
    long_us: _Floats


def main() -> None:
    """Print a line for every device, engine and format."""
    if not _SYSTEMS.exists():
        sys.stdout.write("skipped: the tables are not there\n")
        return
    sys.stdout.write(
        f"{'':<36}{'calls':>8}{'fitted':>8}{'file':>6}{'slowed':>8}{'law':>7}{'none':>7}\n"
    )
    pairs = list(_read_pairs())
    for pair in pairs:
        _tell(pair)
    ends = "".join(f"{f'from {end}':>12}" for end in _ENDS_MS[:-1])
    sys.stdout.write(f"\n{'slowdown that shows in bursts of ms':<36}{'response':>10}{ends}\n")
    for pair in pairs:
        if " vllm " in pair.label:
            _tell_response(pair)
    _tell_regimes()


def _read_pairs() -> Iterator[_Pair]:
    for system, engine, burst, sustained, device in _PAIRS:
        folder = _SYSTEMS / "data" / system / "gemm" / engine
        tables = [_read(folder / version) for version in (burst, sustained)]
        for name, dtype in _FORMATS.items():
            bursts, longs = (table.get(name, {}) for table in tables)
            shapes = sorted(bursts.keys() & longs.keys())
            if len(shapes) < 1_000:
                continue
            columns = dict(zip(("m", "n", "k"), np.array(shapes).T, strict=True))
            target = Target(device=find_device(device), dtype=dtype, phase=Phase.FORWARD)
            limits = compute_limits(find_operator("gemm"), columns, target)
            yield _Pair(
                f"{device} {engine} {name}",
                target,
                RooflineTerms(limits.compute_us, limits.memory_us, 0.0),
                np.array([bursts[shape] for shape in shapes]),
                np.array([longs[shape] for shape in shapes]),
            )


def _read(folder: Path) -> dict[str, dict[tuple[int, int, int], float]]:
    """Return the µs of every GEMM by format; repeats count by their median."""
    table = pq.read_table(folder / "gemm_perf.parquet").to_pydict()
    found: dict[str, dict[tuple[int, int, int], list[float]]] = {}
    names = ("gemm_dtype", "m", "n", "k", "latency")
    for dtype, m, n, k, latency_ms in zip(*(table[name] for name in names), strict=True):
        shape = int(m), int(n), int(k)
        found.setdefault(str(dtype), {}).setdefault(shape, []).append(1e3 * float(latency_ms))
    return {
        name: {shape: float(np.median(times)) for shape, times in calls.items()}
        for name, calls in found.items()
    }


def _tell(pair: _Pair) -> None:
    ratio = pair.long_us / pair.burst_us
    utilization = pair.terms.compute_us / pair.burst_us
    ratio = ratio / np.median(ratio[_is_free(utilization)])
    device, dtype = pair.target.device, pair.target.dtype
    told = np.asarray(slowed_ratio(device, dtype, pair.terms, pair.burst_us))
    is_slowed = told > 1.0
    errors = {share: np.median(np.abs(np.log(ratio / _law(pair, share)))) for share in _SHARES}
    best = min(errors, key=errors.__getitem__)
    share = device.throttled_from_ratio[dtype]
    law, none = (
        np.mean(np.abs(by[is_slowed] / ratio[is_slowed] - 1)) for by in (told, np.ones_like(told))
    )
    sys.stdout.write(
        f"{pair.label:<36}{len(ratio):>8,}{best:>8.2f}{share:>6.2f}{is_slowed.mean():>8.0%}"
        f"{law:>7.1%}{none:>7.1%}\n"
    )


def _tell_response(pair: _Pair) -> None:
    """Print how much of the slowdown of what runs for a second shows in bursts by their length."""
    utilization = pair.terms.compute_us / pair.burst_us
    ratio = pair.long_us / pair.burst_us
    ratio = ratio / np.median(ratio[_is_free(utilization)])
    told = np.asarray(
        slowed_ratio(pair.target.device, pair.target.dtype, pair.terms, pair.burst_us)
    )
    per_run_ms = _LAUNCHES_PER_RUN.get(pair.label.rpartition(" ")[2], 6) * pair.burst_us / 1e3
    begin_ms, end_ms = _RUNS_BEFORE * per_run_ms, _RUNS * per_run_ms
    for low, high in _SLOWDOWNS:
        is_here = (told >= low) & (told < high)
        is_short, is_long = (is_here & where for where in (end_ms < 25, end_ms > 40))
        if min(is_short.sum(), is_long.sum()) < 20:
            continue
        whole = float(np.median(ratio[is_short]))
        errors = [
            np.mean(np.abs(np.log(ratio[is_long] * (1 + shown * (whole - 1)) / whole)))
            for shown in (_shown(begin_ms, end_ms, one)[is_long] for one in _RESPONSES_MS)
        ]
        line = ""
        for first, last in itertools.pairwise(_ENDS_MS):
            here = is_here & (end_ms >= first) & (end_ms < last)
            count = int(here.sum())
            shown = (whole / np.median(ratio[here]) - 1) / (whole - 1) if count > 8 else np.nan
            line += f"{f'{shown:.2f} ({count})' if count > 8 else '':>12}"
        label = f"{pair.label} {low} to {high}"
        sys.stdout.write(f"{label:<36}{_RESPONSES_MS[int(np.argmin(errors))]:>7.0f} ms{line}\n")


def _tell_regimes() -> None:
    """Print how much longer calls take than in bursts, which power would slow in what lasts."""
    folder = _SYSTEMS / "data" / "b200_sxm" / "gemm"
    bursts = _read(folder / "vllm" / "0.24.0")["bfloat16"]
    peak = find_device("b200").peak_flops(DType.BF16)
    sys.stdout.write("\nB200, BF16, over vLLM 0.24.0 at 0.5 to 0.7 of the peak, at 0.1 to 0.15\n")
    for engine, version in _B200_TABLES:
        own = _read(folder / engine / version)["bfloat16"]
        shapes = sorted(bursts.keys() & own.keys())
        flops = 2.0 * np.prod(np.array(shapes, dtype=np.float64), axis=1)
        burst_us = np.array([bursts[shape] for shape in shapes])
        ratio = np.array([own[shape] for shape in shapes]) / burst_us
        utilization = flops / (burst_us * 1e-6) / peak
        is_high = (utilization >= 0.5) & (utilization < 0.7) & (burst_us < 1e3)
        high, low = np.median(ratio[is_high]), np.median(ratio[_is_free(utilization)])
        label = f"{engine} {version}"
        sys.stdout.write(f"{label:<20}{high:.2f}{low:7.2f} ({is_high.sum():,} calls)\n")


def _shown(begin_ms: _Floats, end_ms: _Floats, response_ms: float) -> _Floats:
    """Return how much of a slowdown shows on average between two times after its load began."""
    left = np.exp(-begin_ms / response_ms) - np.exp(-end_ms / response_ms)
    return np.asarray(1.0 - response_ms * left / (end_ms - begin_ms))


def _is_free(utilization: _Floats) -> npt.NDArray[np.bool_]:
    """Return which calls are below every limit, by the share of the peak that they reach."""
    least, most = _FREE_RATIOS
    return (utilization >= least) & (utilization < most)


def _law(pair: _Pair, share: float) -> _Floats:
    """Return the slowdown of a device that power slows from a share of its peak on."""
    file_share = pair.target.device.throttled_from_ratio[pair.target.dtype]
    moved = pair.burst_us * share / file_share
    same = RooflineTerms(
        pair.terms.compute_us, pair.terms.memory_us * share / file_share, pair.terms.floor_us
    )
    return np.asarray(slowed_ratio(pair.target.device, pair.target.dtype, same, moved))


if __name__ == "__main__":
    main()
