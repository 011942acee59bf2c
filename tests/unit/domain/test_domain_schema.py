"""Strict decoding of plain data into dataclasses, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.estimate import DType


@dataclass(frozen=True, kw_only=True, slots=True)
class _Engine:
    max_num_seqs: int = 8

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise InvalidRequestError.of_field("max_num_seqs", "must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scenario:
    name: str
    rate_rps: float = 1.0
    dtype: DType = DType.BF16
    engine: _Engine = field(default_factory=_Engine)
    rates: tuple[float, ...] = ()
    engines: Sequence[_Engine] = ()
    peaks: Mapping[DType, float] = field(default_factory=dict)
    limit: int | None = None
    is_fast: bool = False
    extra: Any = None


def _violations(content: Any) -> set[FieldViolation]:
    with pytest.raises(InvalidRequestError) as caught:
        schema.decode(_Scenario, content)
    return set(caught.value.violations)


def test_decode_fills_every_kind_of_field() -> None:
    content = {
        "name": "a",
        "rate_rps": 2,
        "dtype": "fp16",
        "engine": {"max_num_seqs": 4.0},
        "rates": [1, 2.5],
        "engines": [{}, {"max_num_seqs": 3}],
        "peaks": {"fp8": 1e15, "BF16": 2},
        "limit": 7,
        "is_fast": True,
        "extra": {"anything": [1]},
    }
    expected = _Scenario(
        name="a",
        rate_rps=2.0,
        dtype=DType.FP16,
        engine=_Engine(max_num_seqs=4),
        rates=(1.0, 2.5),
        engines=(_Engine(), _Engine(max_num_seqs=3)),
        peaks={DType.FP8: 1e15, DType.BF16: 2.0},
        limit=7,
        is_fast=True,
        extra={"anything": [1]},
    )
    assert expected == schema.decode(_Scenario, content)


def test_decode_of_encode_is_the_same() -> None:
    scenario = _Scenario(
        name="a", rates=(1.0,), engines=(_Engine(),), peaks={DType.INT4: 1.0}, limit=3
    )
    assert scenario == schema.decode(_Scenario, schema.encode(scenario))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    time_s: float
    num_tokens: int
    hashes: tuple[int, ...] = ()
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trace:
    rows: tuple[_Row, ...] = field(default=(), metadata=schema.BY_COLUMNS)
    engines: tuple[_Engine, ...] = field(default=(), metadata=schema.BY_COLUMNS)


def test_fields_of_many_items_are_written_by_columns_and_read_either_way() -> None:
    rows = (_Row(time_s=0.5, num_tokens=3, hashes=(7, 8)), _Row(time_s=1.0, num_tokens=2**62))
    columns = {"time_s": [0.5, 1.0], "num_tokens": [3, 2**62], "hashes": [[7, 8], []]}
    trace = _Trace(rows=rows, engines=(_Engine(max_num_seqs=2),))
    assert {"rows": columns, "engines": {"max_num_seqs": [2]}} == schema.encode(trace)
    assert trace == schema.decode(_Trace, schema.encode(trace))
    listed = [
        {"time_s": 0.5, "num_tokens": 3, "hashes": [7, 8]},
        {"time_s": 1, "num_tokens": 2**62},
    ]
    assert rows == schema.decode(_Trace, {"rows": listed}).rows
    assert {"rows": [], "engines": []} == schema.encode(_Trace())
    (read,) = schema.decode(_Trace, {"rows": {"time_s": [1], "num_tokens": [2.0]}}).rows
    assert (float, int) == (type(read.time_s), type(read.num_tokens))


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        ({"time_s": [0.5, "x"], "num_tokens": [1, 2]}, "rows.time_s[1]"),
        ({"time_s": [0.5], "num_tokens": [2**63]}, "rows.num_tokens[0]"),
        ({"time_s": [0.5], "num_tokens": [True]}, "rows.num_tokens[0]"),
        ({"time_s": [0.5, 1.0], "num_tokens": [1]}, "rows"),
        ({"time_s": [0.5, 1.0]}, "rows[0].num_tokens"),
        ({"time_s": [0.5], "num_tokens": [1], "size": [1]}, "rows[0].size"),
        ({"time_s": 0.5, "num_tokens": 1}, "rows"),
        ({}, "rows"),
    ],
)
def test_columns_that_cannot_be_used_are_named(rows: Any, place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        schema.decode(_Trace, {"rows": rows})
    assert [place] == [violation.field for violation in caught.value.violations]


def test_items_of_columns_are_checked_one_by_one() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        schema.decode(_Trace, {"engines": {"max_num_seqs": [1, 0]}})
    assert ["engines[1].max_num_seqs"] == [one.field for one in caught.value.violations]


def test_encode_gives_plain_data_with_lower_case_enums() -> None:
    encoded = schema.encode(_Scenario(name="a", peaks={DType.FP8: 1.0}))
    assert "bf16" == encoded["dtype"]
    assert {"fp8": 1.0} == encoded["peaks"]
    assert [] == encoded["rates"]


def test_an_unknown_key_is_an_error_with_its_path() -> None:
    found = _violations({"name": "a", "engine": {"max_seqs": 4}})
    expected = "unknown key; did you mean max_num_seqs? known keys are max_num_seqs"
    assert {FieldViolation("engine.max_seqs", expected)} == found


def test_the_nearest_of_many_keys_is_named_first() -> None:
    (found,) = _violations({"name": "a", "rate_rpm": 4})
    assert found.description.startswith("unknown key; did you mean rate_rps, rates? known keys")
    (far,) = _violations({"name": "a", "zzzz": 4})
    assert far.description.startswith("unknown key; known keys are name, ")


def test_all_errors_are_reported_together() -> None:
    found = _violations({"rates": [1.0, "x"], "dtype": "fp17", "engines": [{"max_num_seqs": "4"}]})
    assert {"name", "rates[1]", "dtype", "engines[0].max_num_seqs"} == {v.field for v in found}


def test_a_check_of_the_class_itself_is_reported_with_its_path() -> None:
    expected = FieldViolation("engine.max_num_seqs", "must be at least 1")
    assert {expected} == _violations({"name": "a", "engine": {"max_num_seqs": 0}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("limit", True),
        ("limit", 1.5),
        ("rate_rps", "1"),
        ("rate_rps", True),
        ("is_fast", 1),
        ("name", 3),
        ("name", None),
        ("rates", 1.0),
        ("rates", "12"),
        ("peaks", [1.0]),
        ("peaks", {"fp17": 1.0}),
        ("engine", 4),
        ("dtype", None),
    ],
)
def test_a_value_of_another_type_is_refused(key: str, value: Any) -> None:
    found = _violations({"name": "a", key: value})
    assert {key} == {v.field.split(".")[0] for v in found}


def test_the_path_prefix_leads_every_violation() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        schema.decode(_Engine, {"x": 1}, "scenario.engine")
    assert ["scenario.engine.x"] == [v.field for v in caught.value.violations]


def test_a_decoded_object_passes_through() -> None:
    engine = _Engine(max_num_seqs=2)
    assert engine is schema.decode(_Scenario, {"name": "a", "engine": engine}).engine


def test_none_is_legal_only_where_the_type_says_so() -> None:
    assert schema.decode(_Scenario, {"name": "a", "limit": None}).limit is None
    assert int is schema.optional_type(int | None)
    assert schema.optional_type(int) is None
    assert schema.optional_type(int | str | None) is None


def test_a_key_leads_through_sections_and_entries_of_lists() -> None:
    content: dict[str, Any] = {"pools": [{"name": "a"}, {"name": "b", "sizes": [1, 2]}]}
    schema.set_key(content, "pools.1.layout.tp", 4)
    schema.set_key(content, "pools.1.sizes.0", 3)
    assert {
        "pools": [{"name": "a"}, {"name": "b", "sizes": [3, 2], "layout": {"tp": 4}}]
    } == content


@pytest.mark.parametrize("key", ["pools.2.name", "pools.first.name", "pools.-1.name"])
def test_an_entry_that_is_not_there_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="a list of 1; they count from 0"):
        schema.set_key({"pools": [{"name": "a"}]}, key, "b")
