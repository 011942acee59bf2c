"""How errors of kernels that stream through memory go together: from one kernel to another.

    python tests/benchmarks/bench_memory_bound_errors.py [path of the shared measurements]

Of every series (a kernel of one device and software, forward or backward) the mean is taken, in log
units, of how many times the time of its data sheet calls take that move more than twice the cache.
Less the mean of all kernels, these are multiplied in pairs of one device and software. Prints every
series, how far calls of one are apart and series are, and the mean product of such pairs over
their mean square: near 1 were kernels slow together, near 0 each for itself, which is what
`simulator/steps/error_parts.py` takes them for. SGLang's conversion to 8 bit, a chain of kernels,
and chains by name are left out.
"""

import itertools
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from training_tables import record_files

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.importing import ImportRequest
from foretoken.catalog.service import CatalogService
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.operators.spec.operator import all_operators
from foretoken.domain.units import US_PER_S
from foretoken.predictor.roofline import Target, compute_limits
from foretoken.predictor.series import Series
from foretoken.predictor.training_rows import read_series
from foretoken.predictor.transfer.row_band import is_row_operator

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_CACHES, _MIN_CALLS = 2.0, 10


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What one device and software make of a kernel: mean and spread, in log units."""

    name: str
    where: str
    mean_log: float
    spread_log: float


def main(data: Path) -> None:
    """Import, compare and print."""
    if not data.is_dir():
        sys.stdout.write(f"skipped: {data} is not on this machine\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        kernels = sorted(_read_kernels(data, Path(scratch)), key=lambda it: (it.where, it.name))
    for kernel in kernels:
        sys.stdout.write(
            f"{kernel.where:32}{kernel.name:36}{np.exp(kernel.mean_log):6.2f} times, calls apart"
            f" {kernel.spread_log:.2f}\n"
        )
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.mean_log)
    middle = float(np.mean([np.mean(means) for means in by_name.values()]))
    pairs = [
        (one.mean_log - middle, other.mean_log - middle)
        for one, other in itertools.combinations(kernels, 2)
        if one.where == other.where and one.name != other.name
    ]
    _write(kernels, pairs, middle)


def _write(kernels: Sequence[_Kernel], pairs: Sequence[tuple[float, float]], middle: float) -> None:
    products = np.mean([one * other for one, other in pairs])
    squares = np.mean([(one**2 + other**2) / 2 for one, other in pairs])
    apart = np.std([kernel.mean_log for kernel in kernels])
    within = np.median([kernel.spread_log for kernel in kernels])
    sys.stdout.write(
        f"{len(kernels)} series, {np.exp(middle):.2f} times their data sheet; series are"
        f" {apart:.2f} apart, calls of one {within:.2f} (median), in log units\n"
        f"{len(pairs)} pairs of kernels on one device and software: {products / squares:+.2f}\n"
    )


def _read_kernels(data: Path, scratch: Path) -> Iterator[_Kernel]:
    catalog = CatalogService(CatalogConfig(path=str(scratch / "catalog.duckdb")))
    catalog.open()
    systems = data / "aiconfigurator" / "systems"
    for path in (*systems.glob("*.yaml"), *systems.rglob("quantize/**/*")):
        if path.is_file():
            copy = scratch / "systems" / path.relative_to(systems)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    for importer, folder in (
        ("vidur", data / "vidur" / "profiling"),
        ("gpumodeling", data / "gpumodeling"),
        ("aiconfigurator", scratch / "systems"),
    ):
        record_files(catalog, importer, ImportRequest(path=folder))
    for name, spec in all_operators().items():
        if is_row_operator(spec):
            rows = catalog.read_measurements(MeasurementFilter(operator=name))
            for series in read_series(rows):
                yield from _compare(series)
    catalog.close()


def _compare(series: Series) -> Iterator[_Kernel]:
    """Yield what a series makes of its data sheet, if it is of one kernel and has large calls."""
    key = series.key
    device = find_device(key.device)
    is_chain = "form=eager" in key.variant or key.framework.startswith("sglang")
    if is_chain or not key.framework or device.kind != "gpu":
        return
    columns = {name: series.points[:, place] for place, name in enumerate(key.spec.dim_names)}
    phase = Phase[str(key.phase).rpartition(".")[2].upper()]
    target = Target(device=device, dtype=DType[key.dtype.upper()], phase=phase)
    memory_us = np.asarray(compute_limits(key.spec, columns, target).memory_us)
    moved_bytes = memory_us * device.memory_bandwidth_bytes_per_s / US_PER_S
    is_large = moved_bytes > _CACHES * device.l2_cache_bytes
    is_large &= memory_us > device.launch_latency_us
    if is_large.sum() < _MIN_CALLS:
        return
    base_us = memory_us + device.launch_latency_us
    ratio_log = np.log(np.asarray(series.latency_us) / base_us)[is_large]
    yield _Kernel(
        f"{key.spec.name} {key.variant} {phase.name.lower()}",
        f"{key.device} {key.framework}",
        float(ratio_log.mean()),
        float(ratio_log.std()),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _DATA)
