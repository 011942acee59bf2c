"""The files of profiles in a folder, where one may extend another and say only what differs."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.magnitude import walk
from foretoken.domain.plugins import parse_yaml_value, scan_yaml

T = TypeVar("T")
_Content = Mapping[str, Any]
# Of us, tokens, or bytes of a buffer: clocks count ns in 64 bits.
_MOST_OF_RULE = 1e12


def load_profiles(cls: type[T], folder: str) -> dict[str, T]:
    """Return the profiles in a folder next to this file as `cls`, by the stem, their `name`.

    A key of a file takes the place of the one in the profile that it `extends`. In `can` so does
    each aspect of `has` (one that is null is not bounded any more) and each conflict that of the
    same aspects (one with no values is lifted); those that the other profile has not are added.

    Raises:
        InvalidRequestError: a file that cannot be used, or profiles that extend each other.
        UnknownPluginError: a file extends a profile that there is not.

    """
    contents = dict(scan_yaml("foretoken.domain.frameworks", folder))
    return {
        stem: schema.decode(cls, {"name": stem, **content}, f"{folder}/{stem}.yaml")
        for stem, content in extend_contents(contents, folder).items()
    }


def read_rule(text: str, path: str) -> Any:
    """Return the value of a rule that a scenario sets, written in YAML.

    Raises:
        InvalidRequestError: it is no YAML, or has numbers that no rule has.

    """
    value = parse_yaml_value(text, path)
    violations = [
        FieldViolation(place, f"may be {_MOST_OF_RULE:g} at most")
        for place, item in walk(value, path)
        if isinstance(item, int | float) and not abs(item) <= _MOST_OF_RULE
    ]
    if violations:
        raise InvalidRequestError.of_violations(violations)
    return value


def extend_contents(contents: Mapping[str, _Content], folder: str) -> dict[str, _Content]:
    """Return the contents of files by stem, each with what it takes from the one it extends.

    Raises:
        InvalidRequestError: files that extend each other.
        UnknownPluginError: a file extends one that there is not.

    """
    done: dict[str, _Content] = {}

    def extend(stem: str, above: tuple[str, ...]) -> _Content:
        if stem in above:
            circle = " extends ".join((*above[above.index(stem) :], stem))
            raise InvalidRequestError.of_field(f"{folder}/{stem}.yaml: extends", circle)
        if stem not in done:
            own = contents[stem]
            if base := own.get("extends"):
                place = f"{folder}/{stem}.yaml: extends"
                UnknownPluginError.look_up(str(base), contents, place, "profile")
                own = _merge(extend(str(base), (*above, stem)), own)
            done[stem] = own
        return done[stem]

    return {stem: extend(stem, ()) for stem in contents}


def _merge(base: _Content, own: _Content) -> _Content:
    can = own.get("can", {})
    if not isinstance(can, Mapping) or "can" not in base:
        return {**base, **own}
    has = {**base["can"].get("has", {}), **can.get("has", {})}
    conflicts = (base["can"].get("conflicts", ()), can.get("conflicts", ()))
    merged = {
        **base["can"],
        **can,
        "has": {aspect: values for aspect, values in has.items() if values is not None},
        "conflicts": _merge_conflicts(*conflicts),
    }
    return {**base, **own, "can": merged}


def _merge_conflicts(base: Sequence[_Content], own: Sequence[_Content]) -> list[_Content]:
    by_aspects = {frozenset(item.get("of", ())): item for item in (*base, *own)}
    return [item for item in by_aspects.values() if all(item.get("of", {}).values())]
