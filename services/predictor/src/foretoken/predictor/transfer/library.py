"""Which series may lend to which."""

from collections.abc import Iterable

from foretoken.predictor.training_rows import Series, SeriesKey
from foretoken.predictor.transfer.device_columns import element_bits
from foretoken.predictor.transfer.pool import Donor, DonorPool, draw_donor

# A series with fewer points says too little of its device.
_MIN_ROWS = 50


class DonorLibrary:
    """The series of a training, as donors to each other; each is prepared when first asked for."""

    def __init__(self, series: Iterable[Series], seed: int) -> None:
        """Keep the series; those that unite frameworks or pick a kernel only repeat others."""
        self._series = [item for item in series if _can_lend(item)]
        self._seed = seed
        self._donors: dict[SeriesKey, Donor] = {}

    def find(self, key: SeriesKey) -> DonorPool | None:
        """Return the pool for a series, None where no other device measured the like.

        The like is the same operator, phase and variant, in numbers of the same width: kernels for
        other widths reach other shares of the peak, and made answers up to three times worse.
        """
        if key.spec.is_collective:
            return None
        donors = [self._draw(item) for item in self._series if _is_alike(item.key, key)]
        return DonorPool(key.operator, key.target, donors) if donors else None

    def _draw(self, series: Series) -> Donor:
        if series.key not in self._donors:
            self._donors[series.key] = draw_donor(series, self._seed)
        return self._donors[series.key]


def _can_lend(series: Series) -> bool:
    key = series.key
    is_single = bool(key.framework) and not key.kernel
    return is_single and not key.spec.is_collective and len(series.points) >= _MIN_ROWS


def _is_alike(other: SeriesKey, wanted: SeriesKey) -> bool:
    same = ("operator", "phase", "variant")
    if any(getattr(other, name) != getattr(wanted, name) for name in same):
        return False
    if other.device == wanted.device or other.target.device.kind != wanted.target.device.kind:
        return False
    return element_bits(other.target.dtype) == element_bits(wanted.target.dtype)
