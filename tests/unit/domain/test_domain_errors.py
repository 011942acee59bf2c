"""Errors: stable reasons, messages that say what to do."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan

from foretoken.domain.errors import (
    FieldViolation,
    ForetokenError,
    InvalidRequestError,
    UnknownModelError,
    at_least,
    find_violations,
    one_of,
    positive,
)


def _all_errors(cls: type[ForetokenError] = ForetokenError) -> Iterator[type[ForetokenError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _all_errors(child)


def test_no_two_errors_share_a_reason() -> None:
    """The reason selects the class on the other side of a wire."""
    reasons = [cls.reason for cls in _all_errors() if not cls.__name__.startswith("_")]
    assert len(set(reasons)) == len(reasons)


def test_an_unknown_name_suggests_the_nearest() -> None:
    err = UnknownModelError.named("llama-3-8", ["qwen2-7b", "llama-3-8b", "phi-2"])
    assert "unknown model 'llama-3-8'; did you mean llama-3-8b?" == err.message
    assert {"name": "llama-3-8", "near": "llama-3-8b"} == err.details


def test_an_unknown_name_near_nothing_lists_what_there_is() -> None:
    err = UnknownModelError.named("zzzz", ["phi-2", "gpt2-xl"])
    assert "unknown model 'zzzz'; did you mean gpt2-xl, phi-2?" == err.message


def test_an_unknown_name_among_none_has_no_hint() -> None:
    assert "unknown model 'x'" == UnknownModelError.named("x", []).message


def test_a_field_error_names_its_field_in_message_and_violation() -> None:
    err = InvalidRequestError.of_field("layout.tp", "must be at least 1")
    assert "layout.tp: must be at least 1" == str(err)
    assert (FieldViolation("layout.tp", "must be at least 1"),) == err.violations


@dataclass(frozen=True)
class _Record:
    size: float = 1.0
    kind: str = "a"


def test_what_must_hold_of_fields_is_stated_by_its_kind() -> None:
    """What is no number is neither positive nor at least anything."""
    assert [] == find_violations({**at_least(_Record(), 1, "size"), **one_of(_Record(), kind="ab")})
    for size, checks in (
        (0.5, at_least(_Record(0.5), 1, "size")),
        (-1.0, at_least(_Record(-1.0), 0, "size")),
        (nan, at_least(_Record(nan), 0, "size")),
        (0.0, positive(_Record(0.0), "size")),
        (nan, positive(_Record(nan), "size")),
    ):
        assert 1 == len(find_violations(checks)), size
    (wrong,) = find_violations(one_of(_Record(kind="c"), kind=("a", "b")), "top.")
    assert ("top.kind", "must be one of a, b") == (wrong.field, wrong.description)
    (low,) = find_violations(at_least(_Record(0.5), 1, "size"))
    assert ("size", "must be at least 1") == (low.field, low.description)
