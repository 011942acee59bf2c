"""Options of policies: text by name, as a scenario has them, read as numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Options of one policy; `field` is where they stand in a scenario ("routing").

    Raises:
        InvalidRequestError: there is one that is not among the `known`.

    """

    field: str
    values: Mapping[str, str]
    known: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse an option the policy does not know."""
        for name in self.values:
            if name not in self.known:
                choices = ", ".join(self.known) or "none"
                raise self.error(name, f"no such option; this policy knows: {choices}")

    def number(
        self, name: str, default: float, *, low: float = 0.0, high: float = math.inf
    ) -> float:
        """Return an option that is a number from `low` to `high`.

        Raises:
            InvalidRequestError: it is not.

        """
        number = self._parse(name, self.values[name]) if name in self.values else default
        if not low <= number <= high:
            needed = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise self.error(name, f"must be {needed}, found {number:g}")
        return number

    def positive(self, name: str, default: float) -> float:
        """Return an option that is a number above zero.

        Raises:
            InvalidRequestError: it is not.

        """
        number = self.number(name, default)
        if number == 0:
            raise self.error(name, "must be positive, found 0")
        return number

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return an option that is a list of numbers of at least 0, written `0, 3600`.

        Raises:
            InvalidRequestError: it is not there, or one is no such number.

        """
        if name not in self.values:
            raise self.error(name, "must be set: numbers with commas between them")
        text = self.values[name].strip("[] ")
        numbers = tuple(self._parse(name, part) for part in text.split(","))
        if min(numbers) < 0:
            raise self.error(name, f"must not be negative, found {text}")
        return numbers

    def error(self, name: str, description: str) -> InvalidRequestError:
        """Return the error about an option."""
        return InvalidRequestError.of_field(f"{self.field}.options.{name}", description)

    def _parse(self, name: str, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self.error(name, f"expected a number, found {text.strip()!r}")
        return number
