"""What cannot be, and why: a rule that judges one case, or a column of cases at once."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.units import Quantity


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit, and what is beyond it: a flag, or a column of flags, made by operators alone.

    `subject` is what a search counts those under that are beyond it; `reason` says why one case is,
    and `field` names the key of that to change.
    """

    subject: str
    is_broken: Quantity
    reason: Callable[[], str]
    field: str = ""


def list_broken(limits: Iterable[Limit]) -> Iterator[FieldViolation]:
    """Yield why a single case is beyond limits."""
    for limit in limits:
        if limit.is_broken:
            yield FieldViolation(limit.field or limit.subject, limit.reason())


def check_limits(limits: Iterable[Limit]) -> None:
    """Check that a single case is within limits.

    Raises:
        InvalidRequestError: with one violation per limit that it is beyond.

    """
    if violations := list(list_broken(limits)):
        raise InvalidRequestError.of_violations(violations)
