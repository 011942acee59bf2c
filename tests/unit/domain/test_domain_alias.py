"""Other names of devices and models: every request resolves them when it is built."""

import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from foretoken.catalog.importing import ImportRequest
from foretoken.domain import ports, schema
from foretoken.domain.alias import canonical_device, canonical_model
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError
from foretoken.domain.hardware.device import all_devices, find_device
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.models.architecture import all_models
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.search import ServingSpace

_PORTS = (ports.CatalogAdminPort, ports.ProfilerPort, ports.PredictorPort, ports.SimulatorPort)
# The fields in which requests name devices.
_NAMING = {"device", "devices", "stage_devices"}


def _dataclasses_in(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint):
        yield typing.cast("type", hint)
        for inner in schema.field_types(typing.cast("type", hint)).values():
            yield from _dataclasses_in(inner)
    for argument in typing.get_args(hint):
        yield from _dataclasses_in(argument)


def _requests() -> list[type]:
    """Return every type that some call of a service takes and that names devices."""
    found = {
        cls
        for port in _PORTS
        for _, method in inspect.getmembers(port, inspect.isfunction)
        for name, hint in typing.get_type_hints(method).items()
        if name != "return"
        for cls in _dataclasses_in(hint)
        if _NAMING & {field.name for field in dataclasses.fields(cls)}
    }
    return sorted({*found, ImportRequest}, key=lambda cls: cls.__name__)


def test_the_requests_that_name_devices_are_found() -> None:
    names = {cls.__name__ for cls in _requests()}
    assert {"ServingScenario", "ReplicaPool", "NodeGroup", "LatencyQuery", "DevicePrice"} <= names


@pytest.mark.parametrize("cls", _requests())
def test_a_request_goes_by_the_devices_own_name(cls: type[Any]) -> None:
    hints = schema.field_types(cls)
    given: dict[str, Any] = dict.fromkeys(_NAMING & hints.keys(), "h200")
    given |= {name: ("h200", "a30") for name in given if hints[name] is not str}
    built = _build(cls, given)
    for name, value in given.items():
        expected = "h200_sxm" if isinstance(value, str) else ("h200_sxm", "a30")
        assert expected == getattr(built, name)


def _build(cls: type[Any], given: Mapping[str, Any]) -> Any:
    """Return the request with what it needs as well: only its own checks are not run before."""
    instance = object.__new__(cls)
    for field in dataclasses.fields(cls):
        default = field.default if field.default is not dataclasses.MISSING else ""
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        object.__setattr__(instance, field.name, given.get(field.name, default))
    try:
        instance.__post_init__()
    except (InvalidRequestError, TypeError):
        # What else is missing is refused after the names are settled.
        return instance
    return instance


def test_names_are_found_whatever_their_case_and_others_are_left() -> None:
    for device in all_devices().values():
        for name in (device.name, *device.vendor_names):
            assert device.name == canonical_device(name.upper()) == find_device(name.lower()).name
    assert canonical_device("abacus") == "abacus"
    with pytest.raises(UnknownDeviceError):
        find_device("abacus")


def test_models_go_by_their_presets_name() -> None:
    for model in all_models().values():
        assert {model.name} == {canonical_model(alias) for alias in model.aliases} | {model.name}
    assert MeasurementFilter(model="meta-llama/Meta-Llama-3-8B").model == "llama-3-8b"
    assert MeasurementFilter(model="somebody/else").model == "somebody/else"


def test_stages_keep_their_order_and_repeat() -> None:
    scenario = TrainingScenario(
        model=load_model("tiny-llama"), device="h200", stage_devices=("h100", "h200", "h100")
    )
    assert scenario.stage_devices == ("h100_sxm", "h200_sxm", "h100_sxm")


def test_prices_go_by_own_names_and_may_not_contradict_each_other() -> None:
    space = ServingSpace(devices=("h200", "a100"), usd_per_hour={"H200": 3.5, "a100": 2.0})
    assert space.usd_per_hour == {"h200_sxm": 3.5, "a100_sxm_80": 2.0}
    with pytest.raises(InvalidRequestError, match="h200_sxm has two values"):
        ServingSpace(usd_per_hour={"h200": 3.5, "h200_sxm": 3.6})
