"""What a framework or an engine can do: the values of aspects there are, and what goes with what.

An aspect is what it may have only some values of: a degree (`pp`), a name (`pipeline_schedule`), or
whether something is so (`uneven_layers`). What a profile does not name is unbounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.domain.errors import FieldViolation

# Stands for every degree above 1.
MORE = "more"
# By aspect, its values that there are.
Has = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Values there are not together: one of `of` for each aspect; `why` says what to do."""

    of: Has
    why: str

    @property
    def aspect(self) -> str:
        """The aspect that the advice is about: the first."""
        return next(iter(self.of))


def describe_values(has: Has, aspect: str) -> str:
    """Return the values of an aspect in words; what is there anyway is not named."""
    if aspect not in has:
        return "all"
    named = [str(item) for item in has[aspect] if item not in ("", "none")]
    return " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:]))) or "none"


def describe_lack(has: Has, aspect: str, value: object) -> str:
    """Return that there is no such value of an aspect, and what there is."""
    there = describe_values(has, aspect)
    return f"has no {value}; " + ("leave it out" if there == "none" else f"it has {there}")


def find_unknown(
    has: Has, conflicts: Sequence[Conflict], known: Sequence[str]
) -> Iterator[FieldViolation]:
    """Yield the aspects there are not."""
    named = [("has", aspect) for aspect in has]
    for place, conflict in enumerate(conflicts):
        named += [(f"conflicts[{place}].of", aspect) for aspect in conflict.of]
        if not conflict.of:
            yield FieldViolation(f"conflicts[{place}].of", "names nothing")
    for path, aspect in named:
        if aspect not in known:
            problem = f"is no aspect; known: {', '.join(known)}"
            yield FieldViolation(f"{path}.{aspect}", problem)
