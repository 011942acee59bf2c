"""A whole profile as its files say it: each value, which file sets it, and what it says of it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from foretoken.domain.frameworks.capability import describe_values
from foretoken.domain.plugins import scan_yaml

_PACKAGE = "foretoken.domain.frameworks"
_KEY = re.compile(r"(\w+):")
# What a profile is called and rests on, which is said once of each file.
_OF_FILE = ("name", "extends", "source", "can")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileValue:
    """One rule, or what a profile can do in one aspect.

    `set_by` is the profile whose file has it (empty: it is so by default), `comment` what that file
    says above it.
    """

    rule: str
    value: Any
    set_by: str = ""
    comment: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSource:
    """Where a profile's file was read from, and what of it says what the framework can do."""

    profile: str
    source: str
    of_capabilities: str = ""


class ProfileFiles:
    """The file of a profile and those of all that it extends, itself first."""

    def __init__(self, folder: str, name: str) -> None:
        """Read the files of a folder next to this one; there is a profile of that name."""
        contents = dict(scan_yaml(_PACKAGE, folder))
        self._contents: dict[str, Mapping[str, Any]] = {}
        self._comments: dict[str, Mapping[str, str]] = {}
        while name:
            self._contents[name] = contents[name]
            self._comments[name] = _read_comments(folder, name)
            name = contents[name].get("extends", "")

    def list_values(self, profile: Any) -> Iterator[ProfileValue]:
        """Yield the rules of the profile that the files make, then what it can do and cannot."""
        for item in fields(profile):
            if item.name not in _OF_FILE:
                by = next((name for name, said in self._contents.items() if item.name in said), "")
                yield ProfileValue(
                    rule=item.name,
                    value=getattr(profile, item.name),
                    set_by=by,
                    comment=self._comments[by].get(item.name, "") if by else "",
                )
        for aspect in profile.can.has:
            value = describe_values(profile.can.has, aspect)
            yield self._capability(f"can: {aspect}", value, {aspect})
        for conflict in profile.can.conflicts:
            words = " with ".join(conflict.of)
            yield self._capability(f"cannot: {words}", conflict.why, set(conflict.of))

    def _capability(self, rule: str, value: str, aspects: set[str]) -> ProfileValue:
        """Return what some aspects together can or cannot, of the first file that says so."""
        found = (
            name
            for name, content in self._contents.items()
            if aspects in _aspects_of(content.get("can", {}))
        )
        return ProfileValue(rule=rule, value=value, set_by=next(found, ""))

    def list_sources(self) -> Sequence[ProfileSource]:
        """Return what the files say of themselves, that of the profile first."""
        return [
            ProfileSource(
                profile=name,
                source=str(content.get("source", "")).strip(),
                of_capabilities=str(content.get("can", {}).get("source", "")).strip(),
            )
            for name, content in self._contents.items()
        ]


def _aspects_of(can: Mapping[str, Any]) -> Sequence[set[str]]:
    """Return the aspects that a file bounds, and those whose conflicts it has."""
    return [
        *({aspect} for aspect in can.get("has", {})),
        *(set(item["of"]) for item in can.get("conflicts", ())),
    ]


def _read_comments(folder: str, name: str) -> Mapping[str, str]:
    """Return the comments above the keys of a profile's file."""
    text = files(_PACKAGE).joinpath(folder, f"{name}.yaml").read_text(encoding="utf-8")
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            above.append(line.removeprefix("#").strip())
            continue
        if above and (key := _KEY.match(line)):
            comments[key[1]] = " ".join(above)
        above = []
    return comments
