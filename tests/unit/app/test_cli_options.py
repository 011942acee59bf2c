"""Options are made of the fields of requests, and their texts are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from foretoken.app.cli.main import app
from foretoken.app.cli.option_text import AXES, parse_limit, parse_limits, parse_ms, parse_s
from foretoken.app.cli.request_options import Answers, OptionsOf, with_option_groups
from foretoken.app.cli.state import parse_assignments
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.option import check_options, describe, flag, option, options_of
from foretoken.domain.requests.search import CapacityRequest, LatencyLimit, ServingSearchRequest
from foretoken.domain.requests.training_run import TrainingRunRequest
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace


@dataclass(frozen=True, kw_only=True, slots=True)
class _LargerSpace(TrainingSpace):
    """A space with an option more."""

    num_racks: tuple[int, ...] = option((), "Racks to fill: `1,2`.", minimum=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LargerRequest(TrainingSearchRequest):
    """A search with options more."""

    space: _LargerSpace = field(default_factory=_LargerSpace, metadata=describe("What it runs on"))
    patience_ratio: float = option(
        0.5, "Share of the time to wait.", minimum=0, maximum=1, group="More"
    )
    taste: str = option("sweet", "One of {choices}.", choices=("sweet", "sour"))
    has_luck: bool = flag("Hope for the best.")
    formats: tuple[DType, ...] = option((), "Number format. Repeatable.")


@dataclass(frozen=True, slots=True)
class _Said:
    seen: list[Mapping[str, object]]

    def run(self, *words: str, is_partial: bool = False) -> str:
        ask = OptionsOf(_LargerRequest, partial=("",) if is_partial else ())

        @with_option_groups
        def command(answers: Annotated[Answers, ask]) -> None:
            self.seen.append(answers.read())

        program = typer.Typer()
        program.command()(command)
        outcome = CliRunner().invoke(program, list(words), env={"COLUMNS": "200"})
        assert 0 == outcome.exit_code, outcome.output
        return outcome.output


def test_an_added_field_is_in_the_help_with_its_bounds_choices_and_default() -> None:
    shown = _Said([]).run("--help")
    for words in (
        "--patience",
        "Share of the time to wait.",
        "0<=x<=1",
        "[default: 0.5]",
        "More",
        "--racks",
        "Racks to fill: `1,2`.",
        "One of `sweet`, `sour`.",
        "--luck",
    ):
        assert words in shown


def test_an_added_field_is_read_and_reaches_the_request() -> None:
    said = _Said([])
    words = ("--patience", "0.25", "--racks", "1:4", "--taste", "sour", "--luck")
    said.run(*words, "--formats", "bf16", "--formats", "fp8")
    found = said.seen[0]
    assert {"num_racks": (1, 2, 4), "partition": "dynamic"} == found["space"]
    assert (0.25, "sour", True) == tuple(
        found[name] for name in ("patience_ratio", "taste", "has_luck")
    )
    assert (DType.BF16, DType.FP8) == found["formats"]
    space = schema.decode(_LargerSpace, found["space"])
    assert (1, 2, 4) == space.num_racks


def test_what_is_written_in_a_file_too_has_no_default_of_its_own() -> None:
    said = _Said([])
    said.run(is_partial=True)
    said.run("--patience", "0", is_partial=True)
    assert [{}, {"patience_ratio": 0.0}] == said.seen


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ((0,), "must be at least 1"),
        ((2, 0), "must be at least 1"),
    ],
)
def test_an_added_field_is_checked(value: tuple[int, ...], problem: str) -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Checked:
        num_racks: tuple[int, ...] = option((), "Racks.", minimum=1)

        def __post_init__(self) -> None:
            check_options(self, "space")

    with pytest.raises(InvalidRequestError, match=f"space: num_racks: {problem}"):
        Checked(num_racks=value)


@pytest.mark.parametrize(
    "cls", [ServingSearchRequest, CapacityRequest, TrainingSearchRequest, TrainingRunRequest]
)
def test_options_are_of_one_field_each(cls: type) -> None:
    names = [name for asked in OptionsOf(cls).list_options() for name in asked.names]
    assert len(set(names)) == len(names)


def test_every_axis_of_the_space_can_be_varied() -> None:
    described = {name for name, said in options_of(TrainingSpace).items() if said.axis}
    assert described == set(AXES.values())


@pytest.mark.parametrize(
    ("words", "alias"),
    [
        (("simulate", "serving"), "--html"),
        (("search", "capacity"), "--out"),
        (("results", "show"), "--html"),
        (("train",), "--report"),
    ],
)
def test_a_page_has_one_name_and_its_others_are_still_read(
    tmp_path: Path, words: tuple[str, ...], alias: str
) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).output
    assert "--page" in shown
    assert alias not in shown.split()
    for name in (alias, "--page"):
        outcome = CliRunner().invoke(app, [*words, "x", name, str(tmp_path / "no" / "page.html")])
        assert 2 == outcome.exit_code
        assert "no folder" in outcome.output


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft p99 2s", ("ttft_ms", 99, 2000)),
        ("itl p99.9 200ms", ("itl_ms", 99.9, 200)),
        ("TPOT P50 30MS", ("tpot_ms", 50, 30)),
        ("e2e mean 1.5 min", ("e2e_latency_ms", 0, 90_000)),
        ("e2e_latency_ms p100 <= 20 s", ("e2e_latency_ms", 100, 20_000)),
        ("itl median < .5ms", ("itl_ms", 50, 0.5)),
    ],
)
def test_limits_are_read(text: str, expected: tuple[str, float, float]) -> None:
    """Metric, statistic and time, in any case."""
    metric, percentile, limit_ms = expected
    assert parse_limit(text) == LatencyLimit(
        metric=metric, percentile=percentile, limit_ms=limit_ms
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ttft 2s", "write METRIC STATISTIC TIME"),
        ("", "write METRIC STATISTIC TIME"),
        ("latency p99 2s", "'latency' is none of ttft, tpot, itl, e2e"),
        ("ttft 99 2s", "'99' is no statistic"),
        ("ttft p101 2s", "'p101' is no statistic"),
        ("ttft p0 2s", "'p0' is no statistic"),
        ("ttft p99 2d", "'2d' is no time"),
        ("ttft p99 2", "--limit: 2 has no unit: 2s or 2ms?"),
        ("ttft p99 0s", "'0s' is no time"),
        ("ttft p99 -2s", "'-2s' is no time"),
    ],
)
def test_what_is_wrong_is_said(text: str, problem: str) -> None:
    """The message quotes what cannot be read."""
    with pytest.raises(InvalidRequestError, match=problem):
        parse_limit(text)


def test_several_limits_keep_their_order() -> None:
    """As they were given."""
    found = parse_limits("--limit", ["itl p99 200ms", "ttft p99 2s"])
    assert [limit.metric for limit in found] == ["itl_ms", "ttft_ms"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2s", 2000), ("30ms", 30), ("250us", 0.25), (" 1.5 MIN", 90_000), ("2h", 7_200_000)],
)
def test_times(text: str, expected: float) -> None:
    """In ms."""
    assert parse_ms(text, "--ttft") == expected
    assert parse_s(text, "--ttft") == expected / 1000


@pytest.mark.parametrize("number", ["2", "0.5", "2000"])
def test_a_number_without_a_unit_is_asked_back(number: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"--ttft: {number} has no unit: .*ms\\?"
    ) as found:
        parse_ms(number, "--ttft")
    assert [violation.field for violation in found.value.violations] == ["--ttft"]


def test_words_become_names_and_values() -> None:
    assert {"m": "1", "path": "a=b", "empty": ""} == parse_assignments(
        ["m=1", "path=a=b", "empty="]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m"], "expected NAME=VALUE, found 'm'"),
        (["=1"], "expected NAME=VALUE, found '=1'"),
        (["m=1", "n=1", "m=2"], "m is given twice: '1' and '2'"),
    ],
)
def test_a_word_that_cannot_be_used_is_named(words: list[str], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        parse_assignments(words)
