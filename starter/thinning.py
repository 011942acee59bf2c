"""Which measurements of NVIDIA's tables the starter keeps: the newest software, even samples."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foretoken.domain.frameworks.engine import DEFAULT_PROFILE, all_engines, find_engine
from foretoken.predictor.software import Relation, parse_software
from foretoken.predictor.training_rows import Series, SeriesKey

# The share of a series' points that is kept, at least `_MIN_POINTS` of them. Source:
# tests/benchmarks/bench_starter.py, whose errors on points left out are within a tenth of those of
# models of all points, but for windowed decode (1.16) and experts of a rank (1.24), which have the
# rows that fit.
_SHARES: Mapping[str, float] = {
    "gemm": 0.28,
    "attention_decode": 0.5,
    "attention_decode_window": 0.6,
    "attention_prefill": 0.6,
    "attention_prefill_window": 0.6,
    "moe_experts": 0.8,
    "moe_local_experts": 0.33,
}
_MIN_POINTS = 1_500
# Multiples of it, modulo one, fill the interval evenly and never repeat.
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
# A version that has less than this part of the points of the fullest one does not replace it.
_FULL_SHARE = 0.5


def choose_points(series: Series) -> npt.NDArray[np.int64]:
    """Return the rows of a series that are kept, ascending: its corners, and an even sample.

    Points lie in the order of their dimensions, on a lattice; a step that is no ratio of whole
    numbers leaves no size of it out, as every second or third point would.
    """
    points = series.points
    share = max(_SHARES.get(series.key.operator, 1.0), _MIN_POINTS / series.num_points)
    is_kept = np.arange(series.num_points) * _GOLDEN % 1.0 < share
    is_end = (points == points.min(axis=0)) | (points == points.max(axis=0))
    return np.flatnonzero(is_kept | is_end.all(axis=1))


def choose_software(sizes: Mapping[SeriesKey, int]) -> set[SeriesKey]:
    """Return the series that are kept: of each engine the newest version that a profile covers.

    Also that of the default profile, and where no profile covers any, the newest. A library of
    collectives has no profile.
    """
    groups: dict[tuple[SeriesKey, str], list[SeriesKey]] = {}
    for key in sizes:
        alike = replace(key, framework=""), parse_software(key.framework).name
        groups.setdefault(alike, []).append(key)
    kept: set[SeriesKey] = set()
    for (_, name), keys in groups.items():
        covered = [key for key in keys if _is_covered(key, _ranges(name))]
        kept.add(_newest(covered or keys, sizes))
        usual = [key for key in keys if _is_covered(key, [_default_range()])]
        kept |= {_newest(usual, sizes)} if usual else set()
    return kept


def _newest(keys: Sequence[SeriesKey], sizes: Mapping[SeriesKey, int]) -> SeriesKey:
    fullest = max(sizes[key] for key in keys)
    full = [key for key in keys if sizes[key] >= _FULL_SHARE * fullest]
    return max(full, key=lambda key: _age(key.framework))


def _age(framework: str) -> tuple[bool, Sequence[int]]:
    """Return what sorts versions, builds of no release before all others."""
    version = framework.partition(" ")[2]
    return not version.startswith("dev-"), [int(word) for word in re.findall(r"\d+", version)][:4]


def _is_covered(key: SeriesKey, ranges: Iterable[str]) -> bool:
    related = (parse_software(text).relate(key.framework, key.operator)[0] for text in ranges)
    return Relation.SAME in related


def _ranges(name: str) -> Sequence[str]:
    profiles = all_engines().values()
    return [text for profile in profiles if (text := profile.software).partition(" ")[0] == name]


def _default_range() -> str:
    return find_engine(DEFAULT_PROFILE).software
