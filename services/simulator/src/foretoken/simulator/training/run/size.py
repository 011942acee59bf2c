"""A run on more or fewer devices: the same batch over another number of replicas.

What a step takes on each size is simulated, once; sizes that are not asked for cost nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import RunSize

# What a size is measured by: a run with so many data-parallel replicas.
MeasureSize = Callable[[TrainingScenario], RunSize]
# Sizes to show where no date is asked for, as multiples of the scenario's.
_SHOWN = (0.5, 1, 2, 4)


class SizeSearch:
    """The runs of one scenario by its number of replicas, each measured once."""

    def __init__(self, scenario: TrainingScenario, measure: MeasureSize) -> None:
        self._scenario = scenario
        self._measure = measure
        self._found: dict[int, RunSize | None] = {}
        self._degrees = list_degrees(scenario)

    @property
    def sizes(self) -> tuple[RunSize, ...]:
        """What was measured, by devices."""
        found = sorted(self._found.items())
        return tuple(size for _, size in found if size is not None)

    def show(self) -> None:
        """Measure a few sizes around the scenario's own."""
        own = self._scenario.layout.dp
        for factor in _SHOWN:
            if own * factor in self._degrees:
                self._at(int(own * factor))

    def find_fewest(self) -> int:
        """Return the devices of the smallest size that is enough, 0 where none is.

        What does not fit may fit on more devices, whose shards are smaller. More replicas then
        shorten a run until its batch is spread thin or failures outweigh them, so the sizes that
        are enough are next to each other: the quickest run is looked for where the largest is not
        enough, then the smallest that is enough below it.
        """
        degrees = self._degrees
        self._at(self._scenario.layout.dp)
        last = len(degrees) - 1
        if not self._is_enough(last):
            last = self._find_quickest()
            if not self._is_enough(last):
                return 0
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            if self._is_enough(middle):
                high = middle
            else:
                low = middle + 1
        size = self._at(degrees[high])
        return size.num_devices if size else 0

    def _find_quickest(self) -> int:
        low, high = 0, len(self._degrees) - 1
        while low < high:
            middle = (low + high) // 2
            if not self._fits(middle) or self._days(middle) > self._days(middle + 1):
                low = middle + 1
            else:
                high = middle
        return low

    def _is_enough(self, index: int) -> bool:
        size = self._at(self._degrees[index])
        return size is not None and size.is_enough

    def _fits(self, index: int) -> bool:
        """Return whether a step can be made, whether or not a run of them ever ends."""
        size = self._at(self._degrees[index])
        return size is not None and size.step_time_ms > 0

    def _days(self, index: int) -> float:
        size = self._at(self._degrees[index])
        return size.days if size is not None and size.days else float("inf")

    def _at(self, dp: int) -> RunSize | None:
        """Return the run with so many replicas; nothing where its layout cannot be."""
        if dp not in self._found:
            layout = replace(self._scenario.layout, dp=dp)
            try:
                self._found[dp] = self._measure(replace(self._scenario, layout=layout))
            except InvalidRequestError:
                self._found[dp] = None
        return self._found[dp]


def list_degrees(scenario: TrainingScenario) -> Sequence[int]:
    """Return the numbers of replicas that the batch can be spread over, ascending."""
    num_micro = scenario.global_batch_size // scenario.micro_batch_size
    small = [dp for dp in range(1, int(num_micro**0.5) + 1) if num_micro % dp == 0]
    return sorted({*small, *(num_micro // dp for dp in small)})
