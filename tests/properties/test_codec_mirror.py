"""Messages and dataclasses have the same fields, and not set means the domain's default."""

import dataclasses
import enum
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from codec_strategies import MIRRORS
from google.protobuf.message import Message

from foretoken.api.types.v1 import estimate_pb2, job_pb2, measurement_pb2, operator_pb2
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.job import Job, JobState
from foretoken.domain.measurements.estimate import DType, Phase, Provenance
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import RunKind
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.wire import codec

_ENUMS: Mapping[type[enum.Enum], Any] = {
    DType: operator_pb2.Dtype,
    Phase: operator_pb2.Phase,
    Provenance: estimate_pb2.Provenance,
    JobState: job_pb2.JobState,
    RunKind: measurement_pb2.RunKind,
}


def _defaults() -> Iterator[tuple[type, dataclasses.Field[Any], Any]]:
    for cls in MIRRORS:
        for field in dataclasses.fields(cls):
            if field.default is not dataclasses.MISSING:
                yield cls, field, field.default
            elif field.default_factory is not dataclasses.MISSING:
                yield cls, field, field.default_factory()


@pytest.mark.parametrize("cls", MIRRORS, ids=lambda cls: cls.__name__)
def test_a_message_has_exactly_the_fields_of_its_dataclass(cls: type) -> None:
    expected = [
        codec.proto_field_name(name, hint)
        for name, hint in schema.field_types(cls).items()
        if (cls, name) not in codec.ARROW_FIELDS
    ]
    names = [field.name for field in MIRRORS[cls].DESCRIPTOR.fields]
    assert expected == [name for name in names if not name.endswith(codec.NAMED)]


@pytest.mark.parametrize("cls", _ENUMS, ids=lambda cls: cls.__name__)
def test_an_enum_has_the_same_names_and_numbers(cls: type[enum.Enum]) -> None:
    prefix = codec.label_prefix(_ENUMS[cls].DESCRIPTOR)
    expected = {f"{prefix}UNSPECIFIED": 0, **{prefix + m.name: m.value for m in cls}}
    assert expected == dict(_ENUMS[cls].items())


def test_a_default_that_is_not_zero_has_presence() -> None:
    """Else a caller in another language could not leave the field out."""
    wrong = []
    for cls, field, default in _defaults():
        if (cls, field.name) in codec.ARROW_FIELDS:
            continue
        hint = schema.field_types(cls)[field.name]
        name = codec.proto_field_name(field.name, hint)
        proto_field = MIRRORS[cls].DESCRIPTOR.fields_by_name[name]
        if default and not isinstance(default, enum.Enum) and not proto_field.has_presence:
            wrong.append(f"{cls.__name__}.{field.name}")
    assert wrong == []


def test_what_is_not_set_takes_the_default() -> None:
    message = MIRRORS[ProfileRequest](device="cpu")  # type: ignore[call-arg]
    assert codec.decode(message, ProfileRequest) == ProfileRequest(device="cpu")


def test_an_empty_scenario_names_what_it_lacks() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.decode(_message(ServingScenario), ServingScenario)
    assert [v.field for v in caught.value.violations] == ["model"]


def test_a_rule_of_the_dataclass_names_the_path() -> None:
    message = _message(ServingScenario)
    message.model.head_count = 3
    message.model.kv_head_count = 2
    with pytest.raises(InvalidRequestError) as caught:
        codec.decode(message, ServingScenario)
    fields = [violation.field for violation in caught.value.violations]
    assert "model.num_layers" in fields
    assert "model.num_kv_heads" in fields


def test_an_enum_number_from_a_newer_peer_is_refused_by_name() -> None:
    message = _message(ServingScenario)
    message.dtype = 99
    with pytest.raises(InvalidRequestError) as caught:
        codec.decode(message, ServingScenario)
    assert "dtype" in [violation.field for violation in caught.value.violations]


def test_a_required_enum_must_be_said() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.decode(_message(Job), Job)
    assert [violation.field for violation in caught.value.violations] == ["state"]


def test_a_number_too_large_for_the_wire_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.encode(TrainRequest(seed=2**63), MIRRORS[TrainRequest])
    assert [violation.field for violation in caught.value.violations] == ["seed"]


@pytest.mark.parametrize(
    ("name", "hint", "expected"),
    [
        ("num_layers", int, "layer_count"),
        ("max_num_seqs", int, "max_seq_count"),
        ("num_micro_batches", int, "micro_batch_count"),
        ("num_held_out", int, "held_out_count"),
        ("is_gated", bool, "gated"),
        ("was_duplicate", bool, "duplicate"),
        ("has_bias", bool, "bias"),
        ("devices_per_node", int, "devices_per_node"),
    ],
)
def test_names_follow_three_rules(name: str, hint: type, expected: str) -> None:
    assert expected == codec.proto_field_name(name, hint)


def test_presets_are_models_that_can_be_sent() -> None:
    """Not set activation, norm and position are those of a Llama."""
    message = MIRRORS[ModelArchitecture]()
    plain = ModelArchitecture(
        name="tiny",
        num_layers=2,
        hidden=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate=16,
        vocab=32,
        max_position=64,
    )
    message.CopyFrom(codec.encode(plain, MIRRORS[ModelArchitecture]))
    for name in ("activation", "gated", "norm", "position"):
        message.ClearField(typing.cast("Any", name))
    assert plain == codec.decode(message, ModelArchitecture)


def _message(cls: type) -> Any:
    message_class: type[Message] = MIRRORS[cls]
    return message_class()
