"""How much slower GEMMs are that run for a second than those in bursts, and what the law says.

Run: python tests/benchmarks/bench_sustained.py

Compares tables of the same GEMMs of one engine on one device, timed in bursts and for about a
second each (columns `power`, `power_limit`). Two versions differ by a factor of their own, the
median ratio of small calls. Prints what is fitted, the share of the peak from which on power slows,
next to the device file's, how many calls it slows, and how far these are off with the law and
without it.
"""

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
_FORMATS = {
    "bfloat16": DType.BF16,
    "fp8": DType.FP8,
    "fp8_block": DType.FP8,
}
# Calls of less of the peak are far from any limit; they tell by what factor versions differ.
_SMALL_RATIO = 0.1
_SHARES = np.linspace(0.1, 1.0, 91)

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
    for pair in _read_pairs():
        _tell(pair)


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
    ratio = ratio / np.median(ratio[utilization < _SMALL_RATIO])
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
