"""Errors: stable reasons, messages that say what to do."""

from collections.abc import Iterator

from foretoken.domain.errors import (
    FieldViolation,
    ForetokenError,
    InvalidRequestError,
    UnknownModelError,
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
