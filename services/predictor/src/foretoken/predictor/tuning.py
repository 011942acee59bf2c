"""What leaving points out taught of a series: its model is trained from it without doing so again.

A catalog that comes with the program brings it, as one file for all of its series.
"""

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretoken.domain.results.report import OperatorTrainingReport
from foretoken.predictor.features import Matrix
from foretoken.predictor.intervals.calibration import Calibration
from foretoken.predictor.intervals.coverage import Tier
from foretoken.predictor.packing import Arrays, pack, unpack
from foretoken.predictor.regression.kriging import Scales
from foretoken.predictor.regression.member import NAMES
from foretoken.predictor.series import SeriesKey, round_latency

_log = logging.getLogger(__name__)

# Raised when what is written changes, or what is learned by leaving points out.
_REVISION = 1
# So much of an identity tells series apart.
_IDENTITY_DIGITS = 16
# Bits of the mantissa that are dropped: 10 of 23 are kept, which is within five in ten thousand.
_DROPPED_BITS = 13
_NUM_TIERS, _NUM_ERRORS = len(Tier), 3
# Shares of members are multiples of one over it.
_NUM_SHARES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """How members of a series are mixed and scaled, and how far off it is.

    `shares` has a row per tier and a column per member. `errors` are the mean, the 90th percentile
    and the share inside their intervals of `num_held_out` points left out.
    """

    shares: Matrix
    scales: Scales
    calibration: Calibration
    num_held_out: int
    errors: tuple[float, float, float]

    def report(self, key: SeriesKey, num_rows: int) -> OperatorTrainingReport:
        """Return the report of a series of so many points, without single points left out."""
        mape_ratio, p90_ratio, coverage_ratio = self.errors
        return OperatorTrainingReport(
            operator=key.operator,
            device=key.topology or key.device,
            num_rows=num_rows,
            num_held_out=self.num_held_out,
            held_out_mape_ratio=mape_ratio,
            held_out_p90_ratio=p90_ratio,
            interval_coverage_ratio=coverage_ratio,
            member_weights=dict(zip(NAMES, self.shares[Tier.GRID].tolist(), strict=True)),
        )

    @property
    def numbers(self) -> list[float]:
        """All figures but shares and counts, as `_read` takes them apart."""
        scales, bounds = self.scales, self.calibration
        own = [*scales.lengths_log, scales.nugget_log, scales.sill_log, bounds.spread_power]
        return [*own, *bounds.tier_log, *self.errors, *bounds.bin_ratio, *bounds.bin_edges_us]


def write_tunings(tunings: Mapping[str, Tuning]) -> bytes:
    """Return the tunings of series by the identities of their trainings as one file."""
    ordered = sorted(tunings.items())
    own = [tuning for _, tuning in ordered]
    numbers = np.array([number for tuning in own for number in tuning.numbers])
    arrays: Arrays = {
        "identity": np.frombuffer(
            b"".join(bytes.fromhex(name[:_IDENTITY_DIGITS]) for name, _ in ordered), np.uint8
        ),
        "num_axes": np.array([len(tuning.scales.lengths_log) for tuning in own], np.uint8),
        "num_bins": np.array([len(tuning.calibration.bin_ratio) for tuning in own], np.uint8),
        "num_held_out": np.array([tuning.num_held_out for tuning in own], np.uint16),
        "shares": np.array([np.rint(tuning.shares * _NUM_SHARES) for tuning in own], np.uint8),
        "numbers": round_latency(numbers, _DROPPED_BITS).astype(np.float32),
    }
    return zlib.compress(pack({"revision": _REVISION}, arrays), 9)


def read_tunings(path: Path) -> "Tunings":
    """Return the tunings of a file; none where there is no file that can be read."""
    try:
        return Tunings(path.read_bytes())
    except FileNotFoundError:
        pass
    except Exception as err:  # noqa: BLE001 - what is damaged can fail anywhere
        _log.warning("series are trained in full: %s cannot be read: %r", path.name, err)
    return Tunings(write_tunings({}))


class Tunings:
    """Tunings by the identity of the training, each read when asked for."""

    def __init__(self, content: bytes) -> None:
        meta, self._arrays = unpack(zlib.decompress(content))
        if meta["revision"] != _REVISION:
            raise ValueError(f"of revision {meta['revision']}, not {_REVISION}")
        size = _IDENTITY_DIGITS // 2
        names = self._arrays["identity"].tobytes()
        starts = range(0, len(names), size)
        self._places = {names[at : at + size].hex(): row for row, at in enumerate(starts)}
        fixed = 3 + _NUM_TIERS + _NUM_ERRORS - 1
        axes, bins = (self._arrays[name].astype(int) for name in ("num_axes", "num_bins"))
        self._ends = np.cumsum(fixed + axes + 2 * bins)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._places)

    def find(self, content_hash: str) -> Tuning | None:
        """Return the tuning of a training, if there is one."""
        row = self._places.get(content_hash[:_IDENTITY_DIGITS])
        if row is None:
            return None
        arrays = self._arrays
        num_axes, num_bins = int(arrays["num_axes"][row]), int(arrays["num_bins"][row])
        start = int(self._ends[row - 1]) if row else 0
        numbers = arrays["numbers"][start : self._ends[row]].astype(np.float64)
        ends = np.cumsum([num_axes, 3, _NUM_TIERS, _NUM_ERRORS, num_bins])
        lengths_log, own, tier_log, errors, bin_ratio, edges_us = np.split(numbers, ends)
        nugget_log, sill_log, spread_power = own.tolist()
        mape_ratio, p90_ratio, coverage_ratio = errors.tolist()
        return Tuning(
            shares=arrays["shares"][row] / _NUM_SHARES,
            scales=Scales(lengths_log, nugget_log, sill_log),
            calibration=Calibration(edges_us, bin_ratio, spread_power, tier_log),
            num_held_out=int(arrays["num_held_out"][row]),
            errors=(mape_ratio, p90_ratio, coverage_ratio),
        )
