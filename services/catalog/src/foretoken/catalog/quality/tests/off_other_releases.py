"""Tables whose small calls take far longer than the same kernel of the engine's other releases.

Releases change a kernel little. Where little is computed and a table still needs many launches more
than another release's, what was timed is not what the engine runs: norms as chains of plain
operators, as NVIDIA notes of vLLM 0.24's modules of latent attention (ai-dynamo/aiconfigurator pull
request 1423; on B200, where they were timed again, they are as fast as those of 0.25), or launches
from the host.
"""

from collections.abc import Iterator

import numpy as np

from foretoken.catalog.dims import Floats, Indices
from foretoken.catalog.quality.line import BINS_MIN, fill_cells, number_rows
from foretoken.catalog.quality.stored_row import StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

# Calls that are small: their work takes no longer than this many launches.
_FLOORS_MAX = 5.0
# Where work decides, two releases are in 98 of 100 of 2,680 pairs of AIConfigurator's tables within
# 1.35 of each other, in the median. Of small calls, pairs further apart than the second limit are
# 1.78 to 127 times apart, or below 1.2.
_RATIO_MIN = 1.5
# So many launches more are no difference of one kernel: those are up to 2 launches apart.
_EXCESS_FLOORS_MIN = 8.0


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    if rows.spec.is_collective:  # eager ones wait for each other and for the host as it may be
        return
    for places, alike in rows.split(("phase", "dtype", "variant", "framework")):
        releases = number_rows(alike, ("run_id", "framework_version"))
        if not releases.any():
            continue
        small = np.flatnonzero(alike.work_us < _FLOORS_MAX * alike.floor_us)
        for release in np.unique(releases[small]).tolist():
            met = _ratios(alike.take(small), releases[small], release)
            here = small[releases[small] == release]
            ratio = float(np.median(met)) if len(met) >= BINS_MIN else 1.0
            excess_us = np.median(alike.latency_us[here]) * (1 - 1 / ratio)
            floor_us = np.median(alike.floor_us[here])
            if ratio > _RATIO_MIN and excess_us > _EXCESS_FLOORS_MIN * floor_us:
                yield FlaggedRows(
                    places[releases == release],
                    f"small calls take {ratio:.3g} times other releases of the same engine and "
                    f"kernel, in {len(met)} places",
                )


def _ratios(rows: StoredRows, releases: Indices, release: int) -> Floats:
    """Return a release's times over those of the fastest other, wherever a kernel has both."""
    ratios = [np.empty(0)]
    for places, kernel in rows.split(("kernel",)):
        found = releases[places]
        others = [other for other in np.unique(found).tolist() if other != release]
        ratios.extend(fill_cells(kernel, found).ratios_of(release, others))
    return np.concatenate(ratios)


TEST = QualityTest(
    name="off_other_releases",
    summary="in a table whose small calls are over 1.5 times slower than other releases' kernel",
    judges=Judges.TABLES,
    find=_find,
)
