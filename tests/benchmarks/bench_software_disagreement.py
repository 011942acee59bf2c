"""How far software stacks are apart that timed the same calls on the same device.

For every operator of the shared measurements: the factor within which 90 % of one software's times
lie of another's, over all pairs that share points, a pair one voice. "Version" is the same software
at two versions. The predictor widens the interval of an answer by another software's table by
these; `predictor/software.py` has them by group of operators.

    python tests/benchmarks/bench_software_disagreement.py [path of the shared measurements]
"""

import itertools
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.operators.spec.operator import all_operators
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.training_rows import read_series

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_SOURCES = (("aiconfigurator", "aiconfigurator/systems"), ("llmservingsim", "llmservingsim"))
_MIN_SHARED = 8

Floats = npt.NDArray[np.float64]
# Apart in log units, by what is compared: group or operator, and another version or software.
Apart = dict[tuple[str, str], list[Floats]]


def main(data: Path) -> None:
    """Import, compare and print."""
    by_group: Apart = defaultdict(list)
    by_operator: Apart = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        catalog = CatalogService(CatalogConfig(path=f"{scratch}/catalog.duckdb"))
        catalog.open()
        for importer, folder in _SOURCES:
            plan = find_importer(importer).read(ImportRequest(path=data / folder))
            list(catalog.record(plan.run, plan.batches))
        for name, spec in all_operators().items():
            rows = catalog.read_measurements(MeasurementFilter(operator=name))
            for case, relation, apart in _compare(read_series(rows)):
                by_group[f"{spec.group}, {case}", relation].append(apart)
                by_operator[name, relation].append(apart)
        catalog.close()
    for title, found in (("group", by_group), ("operator", by_operator)):
        print(f"\n{title:28}{'compared':12}{'pairs':>6}{'points':>9}{'p50':>7}{'p90':>7}")
        for (name, relation), pairs in sorted(found.items()):
            print(f"{name:28}{relation:12}{_describe(pairs)}")


def _compare(series: Sequence[Series]) -> Iterator[tuple[str, str, Floats]]:
    """Yield plain case or variant, what is compared, and how far apart at each point they share."""
    alike: dict[SeriesKey, list[Series]] = defaultdict(list)
    for item in series:
        if item.key.framework and not item.key.kernel:
            alike[replace(item.key, framework="")].append(item)
    for key, members in alike.items():
        for one, other in itertools.combinations(members, 2):
            apart = _apart(one, other)
            if len(apart) >= _MIN_SHARED:
                names = {item.key.framework.partition(" ")[0] for item in (one, other)}
                relation = "version" if len(names) == 1 else "software"
                is_16_bit = key.dtype in ("bf16", "fp16")
                plain = "plain, 16 bit" if is_16_bit else "plain"
                yield "variant" if key.variant else plain, relation, apart


def _apart(one: Series, other: Series) -> Floats:
    times_us = dict(zip(map(tuple, other.points.tolist()), other.latency_us, strict=True))
    pairs = zip(map(tuple, one.points.tolist()), one.latency_us, strict=True)
    return np.array([abs(np.log(t / times_us[p])) for p, t in pairs if p in times_us])


def _describe(pairs: Sequence[Floats]) -> str:
    """Return a row: every pair speaks with one voice, however many points it shares."""
    voices = np.concatenate([np.quantile(apart, np.linspace(0, 1, 101)) for apart in pairs])
    p50, p90 = np.exp(np.quantile(voices, (0.5, 0.9)))
    return f"{len(pairs):6}{sum(map(len, pairs)):9,}{p50:7.2f}{p90:7.2f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _DATA)
