"""Which series may lend to which."""

from collections.abc import Callable, Iterable, Mapping
from typing import Self

from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.transfer.device_columns import element_bits
from foretoken.predictor.transfer.pool import Donor, DonorPool, draw_donor

# A series with fewer points says too little of its device.
_MIN_ROWS = 50


class DonorLibrary:
    """The series of a training, as donors to each other; each is prepared when first asked for."""

    def __init__(
        self, sizes: Mapping[SeriesKey, int], find: Callable[[SeriesKey], Series], seed: int
    ) -> None:
        """Keep what finds series, of so many points each.

        Those that unite frameworks or pick a kernel only repeat others.
        """
        self._keys: dict[tuple[str, str, str], list[SeriesKey]] = {}
        for key, num_points in sizes.items():
            if _can_lend(key, num_points):
                self._keys.setdefault(_what_is_done(key), []).append(key)
        self._find, self._seed = find, seed
        self._donors: dict[SeriesKey, Donor] = {}

    @classmethod
    def of(cls, series: Iterable[Series], seed: int) -> Self:
        """Return the library of series that are at hand."""
        found = {item.key: item for item in series}
        sizes = {key: item.num_points for key, item in found.items()}
        return cls(sizes, found.__getitem__, seed)

    def find(self, key: SeriesKey) -> DonorPool | None:
        """Return the pool for a series, None where no other device measured the like.

        The like is the same operator, phase and variant, in numbers of the same width: kernels for
        other widths reach other shares of the peak, and made answers up to three times worse.
        """
        if key.spec.is_collective:
            return None
        alike = self._keys.get(_what_is_done(key), ())
        donors = [self._draw(own) for own in alike if _is_elsewhere_alike(own, key)]
        return DonorPool(key.operator, key.target, donors) if donors else None

    def _draw(self, key: SeriesKey) -> Donor:
        if key not in self._donors:
            self._donors[key] = draw_donor(self._find(key), self._seed)
        return self._donors[key]


def _can_lend(key: SeriesKey, num_points: int) -> bool:
    is_single = bool(key.framework) and not key.kernel
    return is_single and not key.spec.is_collective and num_points >= _MIN_ROWS


def _what_is_done(key: SeriesKey) -> tuple[str, str, str]:
    return key.operator, key.phase, key.variant


def _is_elsewhere_alike(other: SeriesKey, wanted: SeriesKey) -> bool:
    if other.device == wanted.device or other.target.device.kind != wanted.target.device.kind:
        return False
    return element_bits(other.target.dtype) == element_bits(wanted.target.dtype)
