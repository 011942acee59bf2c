"""What options of a request say, read: each function takes the option's name and its text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.app.cli.state import parse_assignments
from foretoken.client.single_query import find_member
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.search import SERVING_MODES

# Stands for the format a model comes in.
_UNQUANTIZED = "none"
# Stands for every mode.
_BOTH = "both"
# `2x8`: two nodes of eight devices.
_NODES = re.compile(r"(\d+)(?:x(\d+))?")


def read_names(_: str, text: str) -> tuple[str, ...]:
    """Return the words between commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def read_words(_: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of an option that is repeated."""
    return tuple(words)


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


def read_formats(option: str, text: str) -> tuple[str, ...]:
    """Return formats of weights; `none` is the model's own, which has no name."""
    return tuple("" if word == _UNQUANTIZED else word for word in read_names(option, text))


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
    return tuple(find_member(DType, word, option.strip("-")) for word in words)


def read_models(_: str, words: Sequence[str]) -> tuple[ModelArchitecture, ...]:
    """Return models by their names or the paths of their `config.json`.

    Raises:
        UnknownModelError: there is no such preset.

    """
    return tuple(load_model(word) for word in words)
