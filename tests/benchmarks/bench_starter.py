"""What thinning costs: errors on points left out, of models of the starter's points and of all.

Of every operator a few series of the wheel's tables on one device: a tenth of the points is left
out, one model learns the rest, the other the part of the rest that `starter/thinning.py` keeps.
Prints both errors by operator and their ratio; the starter wants at most 1.1.

    python tests/benchmarks/bench_starter.py --wheel FILE [--device h200_sxm] [--series 3]
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_STARTER = Path(__file__).resolve().parents[2] / "starter"
sys.path.insert(0, str(_STARTER))

from make_starter import CatalogOf  # noqa: E402 - a program next to the starter
from thinning import choose_points, choose_software  # noqa: E402 - a program next to the starter

from foretoken.catalog.installing import NVIDIA, InstallRequest, open_install  # noqa: E402
from foretoken.domain.measurements.measurement import MeasurementFilter  # noqa: E402
from foretoken.domain.ports import CatalogPort  # noqa: E402
from foretoken.predictor.config import PredictorConfig  # noqa: E402
from foretoken.predictor.intervals.coverage import Tier  # noqa: E402
from foretoken.predictor.series import Series  # noqa: E402
from foretoken.predictor.trainer import SeriesModel, train_series  # noqa: E402
from foretoken.predictor.training_rows import group_rows, keep_usable, read_fastest  # noqa: E402
from foretoken.wire.arrow import read_table  # noqa: E402

# A tenth is left out, of each series at most so many points.
_SHARE, _MOST = 0.1, 2_000
# Series of fewer points say little of either.
_LEAST = 300
_CONFIG = PredictorConfig(state_folder="")


def main() -> int:
    """Read, learn and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="the wheel with NVIDIA's tables")
    parser.add_argument("--device", default="h200_sxm")
    parser.add_argument("--series", type=int, default=3, help="of every operator")
    options = parser.parse_args()
    if options.wheel is None:
        print("NVIDIA's tables are not at hand (--wheel): nothing to compare with")
        return 0
    request = InstallRequest(dataset=NVIDIA, systems=options.device, wheel=options.wheel)
    with (
        tempfile.TemporaryDirectory() as folder,
        CatalogOf(Path(folder)) as catalog,
        open_install(request) as plan,
    ):
        for _ in catalog.record(plan.run, plan.batches):
            pass
        print_errors(catalog, options.device, options.series)
    return 0


def print_errors(catalog: CatalogPort, device: str, num_series: int) -> None:
    """Print the errors of every operator that a device has."""
    print(f"{'operator':<28}{'points':>9}{'kept':>9}{'all':>8}{'thinned':>9}{'ratio':>8}")
    coverage = catalog.describe_coverage()
    for operator in sorted({found.operator for found in coverage if found.device == device}):
        found = list(_read(catalog, device, operator, num_series))
        if not found:
            continue
        compared = [_compare(series) for series in found]
        num_points, num_kept = (sum(item[place] for item in compared) for place in (0, 1))
        full, thinned = (float(np.mean([item[place] for item in compared])) for place in (2, 3))
        print(
            f"{operator:<28}{num_points:>9,}{num_kept:>9,}{full:>8.2%}{thinned:>9.2%}"
            f"{thinned / full:>8.3f}",
            flush=True,
        )


def _read(catalog: CatalogPort, device: str, operator: str, num_series: int) -> Iterator[Series]:
    """Yield series that the starter has, from the largest to the smallest that tells something."""
    selection = MeasurementFilter(device=device, operator=operator)
    table = keep_usable(read_table(catalog.read_measurements(selection)))
    found = {key: read_fastest(key, rows) for key, rows in group_rows(table).items()}
    kept = [found[key] for key in choose_software(found) if found[key].num_points >= _LEAST]
    kept.sort(key=lambda series: (-series.num_points, series.key))
    places = np.linspace(0, len(kept) - 1, min(num_series, len(kept))).astype(int)
    yield from (kept[place] for place in places)


def _compare(series: Series) -> tuple[int, int, float, float]:
    """Return the points, those kept, and the mean errors of models of all and of the kept ones."""
    order = np.random.default_rng(0).permutation(series.num_points)
    num_out = min(round(_SHARE * series.num_points), _MOST)
    out, rest = series.take(np.sort(order[:num_out])), series.take(np.sort(order[num_out:]))
    kept = rest.take(choose_points(rest))
    errors = (_error(train_series(known, _CONFIG, 0), out) for known in (rest, kept))
    return rest.num_points, kept.num_points, *errors


def _error(model: SeriesModel, asked: Series) -> float:
    design = asked.design
    tiers = np.full(asked.num_points, int(Tier.GRID))
    found = np.exp(model.regressor.predict(design, tiers).log_ratio) * design.base_us
    return float(np.mean(np.abs(found / asked.latency_us - 1)))


if __name__ == "__main__":
    sys.exit(main())
