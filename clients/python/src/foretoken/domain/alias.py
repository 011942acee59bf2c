"""The other names of devices and models, and the one name that everything inside goes by.

Requests resolve them when they are built, so it is the same whether a person, a file or the wire
said `h200`. Nothing else has other names: topologies, engines, trainers and operators have one.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.sourced import read_folder
from foretoken.domain.plugins import scan_yaml


def canonical_device(name: str) -> str:
    """Return a device's own name for one of its names, whatever its case.

    One that no device has is returned as it is: who looks the device up refuses it.
    """
    return _device_names().get(name.lower(), name)


def canonical_model(name: str) -> str:
    """Return a preset's own name for one of its names, whatever its case; others as they are."""
    return _model_names().get(name.lower(), name) if name else name


def settle_devices(request: object, *fields: str) -> None:
    """Put the devices' own names into fields of a frozen dataclass that is being made.

    A field is a name, names, or values by name.

    Raises:
        InvalidRequestError: two names of one device have different values.

    """
    for field in fields:
        object.__setattr__(request, field, _settle(getattr(request, field), field))


def settle_model(request: object, field: str) -> None:
    """Put the preset's own name into a field of a frozen dataclass that is being made."""
    object.__setattr__(request, field, canonical_model(getattr(request, field)))


def _settle(given: Any, field: str) -> Any:
    if isinstance(given, str):
        return canonical_device(given)
    if not isinstance(given, Mapping):
        return tuple(canonical_device(name) for name in given)
    settled = {canonical_device(name): value for name, value in given.items()}
    for name, value in given.items():
        if settled[canonical_device(name)] != value:
            raise InvalidRequestError.of_field(
                field, f"{canonical_device(name)} has two values, one of them as {name}"
            )
    return settled


@cache
def _device_names() -> Mapping[str, str]:
    return {
        name.lower(): stem
        for stem, content in read_folder("devices").items()
        for name in (stem, *content.get("vendor_names", ()))
    }


@cache
def _model_names() -> Mapping[str, str]:
    return {
        name.lower(): stem
        for stem, content in scan_yaml("foretoken.domain.models", "presets")
        for name in (stem, *content.get("aliases", ()))
    }
