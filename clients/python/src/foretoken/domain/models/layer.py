"""Layers of a model as kinds in a pattern: what mixes tokens, and what each token passes through.

A pattern says the order of named layers: `M E M E A`, with runs `3*M` and groups `15*(3*linear
full)`, so that a model of a hundred layers is a line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.kinds.spec.kind import find_kind

# Longer than any model, and short enough to be written out.
MOST_LAYERS = 4096
_WORD = re.compile(r"\s*(?:(\d+)\s*\*|([()])|([^\s()*]+))")


def every_nth(num_layers: int, period: int, place: int = -1) -> list[bool]:
    """Return of every layer whether it is the one of each `period` that is at `place` from 0 on.

    Below 0 it is the last of them. A period of 0 has none.
    """
    at = place if place >= 0 else period - 1
    return [period > 0 and layer % period == at for layer in range(num_layers)]


class FrozenDims(Mapping[str, int]):
    """Dimensions by name that do not change, and so can be part of a key."""

    __slots__ = ("_dims",)

    def __init__(self, dims: Mapping[str, int] | None = None) -> None:
        """Keep a copy, sorted by name."""
        self._dims = dict(sorted((dims or {}).items()))

    def __getitem__(self, name: str) -> int:
        """Return a dimension."""
        return self._dims[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._dims)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._dims)

    def __hash__(self) -> int:
        """Hash names and values."""
        return hash(tuple(self._dims.items()))

    def __repr__(self) -> str:
        """Show them as the mapping they are."""
        return repr(self._dims)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPart:
    """A kind (a file of `models/kinds`) with its dimensions; those left out have its defaults.

    Raises:
        UnknownPluginError: there is no such kind.
        InvalidRequestError: it has other dimensions, or needs one that is missing.

    """

    kind: str
    dims: Mapping[str, int]

    def __post_init__(self) -> None:
        """Fill in defaults and check, as the kind does."""
        object.__setattr__(self, "dims", FrozenDims(find_kind(self.kind).complete(self.dims)))

    def __getitem__(self, name: str) -> int:
        """Return a dimension."""
        return self.dims[name]

    def changed(self, **dims: int) -> "LayerPart":
        """Return the part with other dimensions."""
        return LayerPart(kind=self.kind, dims={**self.dims, **dims})


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """A layer by the name that patterns have for it; a half that is None is not there."""

    name: str
    mixer: LayerPart | None = None
    feed_forward: LayerPart | None = None

    def __post_init__(self) -> None:
        """Refuse a name that no pattern can hold, and a layer of nothing."""
        problems = {
            "name": (
                re.fullmatch(r"[^\s()*\d][^\s()*]*", self.name) is not None,
                "must be one word that begins with no digit, without brackets and stars",
            ),
            "mixer": (
                self.mixer is not None or self.feed_forward is not None,
                "a layer has a mixer, a feed_forward or both",
            ),
        }
        InvalidRequestError.check(f"layer {self.name}", problems)


def read_pattern(pattern: str) -> tuple[str, ...]:
    """Return the names of a pattern, one for each layer.

    Raises:
        InvalidRequestError: brackets or stars do not add up, or there are too many layers.

    """
    groups: list[list[str]] = [[]]
    counts: list[int] = []
    count, place, text = 0, 0, pattern.rstrip()
    while place < len(text):
        word = _WORD.match(text, place)
        if word is None or (count and (word[1] or word[2] == ")")):
            raise _refuse(pattern, f"at {text[place:]!r}")
        place = word.end()
        if word[1]:
            count = min(int(word[1][:6]), MOST_LAYERS + 1)
            if not count:
                raise _refuse(pattern, "a layer is there 0 times")
            continue
        count = count or 1
        if word[2] == "(":
            groups.append([])
            counts.append(count)
        else:
            if word[2] == ")":
                if not counts:
                    raise _refuse(pattern, "a bracket is closed that is not open")
                names, times = groups.pop(), counts.pop()
            else:
                names, times = [word[3]], count
            if len(groups[-1]) + len(names) * times > MOST_LAYERS:
                raise _refuse(pattern, f"has more than {MOST_LAYERS:,} layers")
            groups[-1].extend(names * times)
        count = 0
    if counts or count:
        raise _refuse(pattern, "it ends inside a group or a run")
    return tuple(groups[0])


def write_pattern(names: Sequence[str]) -> str:
    """Return the shortest pattern of these layers that one level of groups gives.

    `read_pattern` returns the names again.
    """
    candidates = [_runs(names)]
    for period in range(2, len(names) // 2 + 1):
        for start in range(min(period + 4, len(names))):
            times = _repeats(names, start, period)
            if times > 1:
                end = start + times * period
                group = f"{times}*({_runs(names[start : start + period])})"
                parts = (_runs(names[:start]), group, _runs(names[end:]))
                candidates.append(" ".join(part for part in parts if part))
    return min(candidates, key=len)


def _repeats(names: Sequence[str], start: int, period: int) -> int:
    unit, times = names[start : start + period], 0
    while names[start + times * period : start + (times + 1) * period] == unit:
        times += 1
    return times


def _runs(names: Sequence[str]) -> str:
    runs: list[tuple[str, int]] = []
    for name in names:
        count = runs.pop()[1] if runs and runs[-1][0] == name else 0
        runs.append((name, count + 1))
    return " ".join(name if count == 1 else f"{count}*{name}" for name, count in runs)


def _refuse(pattern: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError.of_field("pattern", f"{pattern[:80]!r}: {problem}")
