"""Texts of options, read: counts, dimensions, durations, latency limits, axes of a space."""

import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.app.cli.dim_text import parse_values
from foretoken.app.cli.state import parse_assignments
from foretoken.client.single_query import find_member
from foretoken.domain import schema
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import InvalidRequestError, find_near
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.option import options_of
from foretoken.domain.requests.search import SERVING_MODES, LatencyLimit
from foretoken.domain.requests.training_search import TrainingSpace
from foretoken.domain.units import MS_PER_S

# Stands for every mode.
_BOTH = "both"
# `2x8`: two nodes of eight devices.
_NODES = re.compile(r"(\d+)(?:x(\d+))?")
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4, "h": 3.6e6}
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)")
_LIMIT = "--limit"
_LIMITED = {
    **{name: name for name in LIMITED},
    **{name.removesuffix("_ms"): name for name in LIMITED},
    "e2e": "e2e_latency_ms",
}
_SHORT_NAMES = ("ttft", "tpot", "itl", "e2e")
_PERCENTILE = re.compile(r"p(\d+\.?\d*)")
_HIGHEST_PERCENTILE = 100
# As a scenario calls what varies, and as people do, by the space's name for it.
AXES: Mapping[str, str] = {
    name: field for field, said in options_of(TrainingSpace).items() for name in said.axis
}
# Of these the scenario's own value is searched where no other is named. That of the others is not
# read, as a search that names none tries all that is sensible.
_KEPT_AXES = ("device", "num_devices", "global_batch_size", "overlap", "pipeline_schedule", "vpp")
SEARCHED_AXES = frozenset(AXES).difference(_KEPT_AXES)
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# Stands for no weight parallelism, which has no name.
_NO_NAME = {"none": ""}


def read_names(_: str, text: str) -> tuple[str, ...]:
    """Return the words between commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def read_words(_: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of an option that is repeated."""
    return tuple(words)


def read_device(_: str, name: str) -> str:
    """Return a device's own name for another of its names."""
    return canonical_device(name)


def read_duration(option: str, text: str) -> float:
    """Return a duration in s; see `parse_ms`."""
    return parse_ms(text, option) / MS_PER_S


def read_dtype(option: str, word: str) -> DType:
    """Return a number format by its name.

    Raises:
        InvalidRequestError: there is no such format.

    """
    return find_member(DType, word, option.strip("-"))


def read_off(_: str, is_given: bool) -> bool:
    """Return what a flag sets that turns its field off."""
    return not is_given


def read_devices(option: str, text: str) -> tuple[str, ...]:
    """Return the devices' own names for those between commas, each once.

    Raises:
        InvalidRequestError: one is a number.

    """
    names = read_names(option, text)
    if numbers := [name for name in names if name.isdigit()]:
        raise InvalidRequestError.of_field(
            option, f"{numbers[0]} is no device; how many there are is --gpus {numbers[0]}"
        )
    return tuple(dict.fromkeys(canonical_device(name) for name in names))


def read_modes(option: str, text: str) -> tuple[str, ...]:
    """Return the modes that are tried; none stand for all.

    Raises:
        InvalidRequestError: there is no such mode.

    """
    if text not in (_BOTH, *SERVING_MODES):
        raise InvalidRequestError.of_field(
            option, f"{text!r} is none of {', '.join(SERVING_MODES)}, {_BOTH}"
        )
    return () if text == _BOTH else (text,)


def read_prices(option: str, words: Sequence[str]) -> dict[str, float]:
    """Return `h200_sxm=3.5` words as USD an hour by the device's own name.

    Raises:
        InvalidRequestError: a price is no number, or negative, or a device has two.

    """
    prices: dict[str, float] = {}
    for name, text in parse_assignments(words).items():
        device = canonical_device(name)
        if device in prices:
            raise InvalidRequestError.of_field(option, f"{device} is given twice")
        try:
            prices[device] = float(text)
        except ValueError:
            prices[device] = -1.0
        if not prices[device] >= 0:
            raise InvalidRequestError.of_field(
                option, f"expected USD an hour as {device}=3.5, got {text!r}"
            )
    return prices


def check_prices(space: Mapping[str, Any]) -> None:
    """Refuse prices of devices that are not among those searched, where these are named.

    Raises:
        InvalidRequestError: there are such.

    """
    grouped = tuple(group["device"] for group in space.get("node_groups", ()))
    searched = [canonical_device(name) for name in space.get("devices", ()) or grouped]
    if unknown := [name for name in space.get("usd_per_hour", {}) if name not in searched]:
        if not searched:
            return
        raise InvalidRequestError.of_field(
            "--price", f"{', '.join(unknown)} is not searched: --devices has {', '.join(searched)}"
        )


def read_nodes(option: str, words: Sequence[str]) -> tuple[Mapping[str, Any], ...]:
    """Return `a100_sxm_80=4x8` words as groups of nodes.

    Raises:
        InvalidRequestError: a word is written otherwise.

    """
    groups = []
    for device, text in parse_assignments(words).items():
        matched = _NODES.fullmatch(text)
        if matched is None:
            raise InvalidRequestError.of_field(
                option, f"expected {device}=4x8, nodes times devices of each, got {text!r}"
            )
        num_nodes, per_node = int(matched[1]), int(matched[2] or 0)
        groups.append({"device": device, "num_nodes": num_nodes, "devices_per_node": per_node})
    return tuple(groups)


def read_dtypes(option: str, words: Sequence[str]) -> tuple[DType, ...]:
    """Return number formats by their names.

    Raises:
        InvalidRequestError: there is no such format.

    """
    return tuple(read_dtype(option, word) for word in words)


def read_models(_: str, words: Sequence[str]) -> tuple[ModelArchitecture, ...]:
    """Return models by their names or the paths of their `config.json`.

    Raises:
        UnknownModelError: there is no such preset.

    """
    return tuple(load_model(word) for word in words)


def parse_ms(text: str, option: str) -> float:
    """Return a positive duration in ms; `option` is what an error is about.

    A number alone is not taken for one unit or the other: the error requests the unit.

    Raises:
        InvalidRequestError: it is no positive number with a unit.

    """
    matched = _DURATION.fullmatch(text.strip().lower())
    if matched is None or float(matched[1]) == 0 or (matched[2] and matched[2] not in _MS):
        raise InvalidRequestError.of_field(
            option, f"{text!r} is no time: write a positive number and a unit, `200ms` or `2s`"
        )
    if not matched[2]:
        number = matched[1]
        raise InvalidRequestError.of_field(
            option, f"{number} has no unit: {number}s or {number}ms?"
        )
    return float(matched[1]) * _MS[matched[2]]


def parse_s(text: str, option: str) -> float:
    """Return a positive duration in s; see `parse_ms`."""
    return parse_ms(text, option) / MS_PER_S


def parse_limit(text: str) -> LatencyLimit:
    """Return the limit that `METRIC STATISTIC TIME` names; `<=` or `<` may stand before the time.

    Raises:
        InvalidRequestError: it is written otherwise, or names what there is not.

    """
    words = text.lower().replace("<=", " ").replace("<", " ").split()
    if len(words) == 4:  # noqa: PLR2004 - "2 s", the unit apart
        words[2:] = ["".join(words[2:])]
    if len(words) != 3:  # noqa: PLR2004 - metric, statistic, time
        raise _limit_error(text, "write METRIC STATISTIC TIME, such as `ttft p99 2s`")
    metric, statistic, time = words
    if metric not in _LIMITED:
        raise _limit_error(text, f"{metric!r} is none of {', '.join(_SHORT_NAMES)}")
    return LatencyLimit(
        metric=_LIMITED[metric],
        percentile=_parse_statistic(text, statistic),
        limit_ms=parse_ms(time, _LIMIT),
    )


def parse_limits(_: str, texts: Sequence[str]) -> tuple[LatencyLimit, ...]:
    """Return the limits of the texts of an option, in order.

    Raises:
        InvalidRequestError: one cannot be read.

    """
    return tuple(parse_limit(text) for text in texts)


def _parse_statistic(text: str, statistic: str) -> float:
    if statistic in {"mean", "avg", "average"}:
        return 0.0
    matched = _PERCENTILE.fullmatch("p50" if statistic == "median" else statistic)
    percentile = float(matched[1]) if matched else 0.0
    if not 0 < percentile <= _HIGHEST_PERCENTILE:
        raise _limit_error(text, f"{statistic!r} is no statistic: write mean, p50, p99 or p99.9")
    return percentile


def _limit_error(text: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError.of_field(_LIMIT, f"{text!r}: {problem}")


def parse_axes(words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return values by the name of `TrainingSpace`; ranges of numbers may be `1:8`, doubling.

    Raises:
        InvalidRequestError: no such axis, no values, or one that is not of its kind.

    """
    return dict(_parse_axis(name, text) for name, text in parse_assignments(words).items())


def _parse_axis(name: str, text: str) -> tuple[str, tuple[Any, ...]]:
    axis = AXES.get(name, name if name in AXES.values() else "")
    if not axis:
        near = find_near(name, AXES)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise InvalidRequestError.of_field("--vary", f"{name!r} is none of {', '.join(AXES)}{hint}")
    if not read_names(name, text):
        raise InvalidRequestError.of_field("--vary", f"{name} has no values: {name}=1,2")
    (kind, _) = typing.get_args(schema.field_types(TrainingSpace)[axis])
    parse: Callable[[str, str], tuple[Any, ...]] = {int: parse_values, bool: _parse_truths}.get(
        kind, read_names
    )
    values = parse(f"--vary {name}", text)
    if axis == "weight_parallel":
        values = tuple(_NO_NAME.get(value, value) for value in values)
    return axis, values


def _parse_truths(name: str, text: str) -> tuple[bool, ...]:
    words = [word.lower() for word in read_names(name, text)]
    if wrong := [word for word in words if word not in _TRUTHS]:
        raise InvalidRequestError.of_field(name, f"expected true or false, got {wrong[0]!r}")
    return tuple(dict.fromkeys(_TRUTHS[word] for word in words))
