"""Comparisons: what differs, ratios, names, and what cannot be compared."""

import json
from dataclasses import replace

import pytest
from compare_examples import keep, serving_of, training_of
from hypothesis import given
from hypothesis import strategies as st
from search_reports import build_capacity, build_search
from training_run_examples import RUN_REPORT
from training_search_reports import build_training_search

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.metric import Figure
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.results.report import Feasibility, ServingReport
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.comparison import (
    Change,
    compare_figures,
    list_changes,
    list_remarks,
    list_warnings,
    name_runs,
)

_LEAVES = st.one_of(st.integers(0, 3), st.booleans(), st.sampled_from(["a", "b"]))
_CONFIGURATIONS = st.dictionaries(
    st.sampled_from(["tp", "pp", "dtype"]),
    st.one_of(_LEAVES, st.dictionaries(st.sampled_from(["x", "y"]), _LEAVES, min_size=1)),
)


def _changes(*configurations: object) -> dict[str, tuple[str, ...]]:
    texts = [json.dumps(content) for content in configurations]
    return {change.path: change.values for change in list_changes(texts)}


def test_a_change_is_told_by_its_dotted_path() -> None:
    """Nested keys, entries of lists and keys that one of them lacks."""
    first = {"layout": {"tp": 2, "pp": 1}, "pools": [{"n": 1}, {"n": 2}], "dtype": "bf16"}
    second = {"layout": {"tp": 4, "pp": 1}, "pools": [{"n": 1}, {"n": 3}], "zero_stage": 1}
    expected = {
        "layout.tp": ("2", "4"),
        "pools.1.n": ("2", "3"),
        "dtype": ("bf16", "-"),
        "zero_stage": ("-", "1"),
    }
    assert _changes(first, second) == expected


def test_values_are_told_as_in_a_scenario_file() -> None:
    """Also lists, what is empty, and truth."""
    expected = {"layers": ("8, 7", "-"), "on": ("true", "false"), "rate": ("0.5", "2")}
    first = {"layers": [8, 7], "on": True, "rate": 0.5, "none": None}
    assert _changes(first, {"layers": [], "on": False, "rate": 2, "none": ""}) == expected


def test_a_long_trace_is_one_change() -> None:
    """Shown by its length, and by its content where the lengths are alike."""
    one = {"trace": [{"at": number} for number in range(100)]}
    other = {"trace": [{"at": number + 1} for number in range(100)]}
    (values,) = _changes(one, other).values()
    assert ["100 entries"] * 2 == [value.partition(",")[0] for value in values]
    assert values[0] != values[1]
    assert not _changes(one, one)


def test_another_model_is_one_change() -> None:
    """Its name stands for its sizes; without another name they are shown."""
    small, large = {"name": "s", "layers": 2}, {"name": "l", "layers": 4}
    wanted = {"scenario.model.name": ("s", "l")}
    assert _changes({"scenario": {"model": small}}, {"scenario": {"model": large}}) == wanted
    grown = {"model": {**small, "layers": 4}}
    assert _changes({"model": small}, grown) == {"model.layers": ("2", "4")}


@given(_CONFIGURATIONS, _CONFIGURATIONS)
def test_changes_are_symmetric_and_none_of_equal_ones(
    one: dict[str, object], other: dict[str, object]
) -> None:
    """The law of a difference."""
    forth, back = _changes(one, other), _changes(other, one)
    assert forth == {path: (first, second) for path, (second, first) in back.items()}
    assert not _changes(one, one)


def test_ratios_are_to_the_first_run() -> None:
    values = (4.0, 2.0, 5.0, None)
    figure = Figure(label="step", metric=METRICS["step_time_ms"], values=values)
    assert figure.ratios == (1.0, 0.5, 1.25, None)
    words = [figure.describe_ratio(place) for place in range(4)]
    assert words == ["same", "0.5x, better", "1.25x, worse", "-"]


@pytest.mark.parametrize("values", [(0.0, 2.0), (None, 2.0), (-1.0, 2.0), (1.0, -2.0)])
def test_there_is_no_ratio_where_it_would_mean_nothing(
    values: tuple[float | None, float],
) -> None:
    assert (
        Figure(label="free", metric=METRICS["margin_bytes"], values=values).describe_ratio(1) == "-"
    )


def test_figures_of_training_steps() -> None:
    """Those of the reports, in their units; parts that one has not are 0 there."""
    first = replace(
        training_of(), step_time_ms=100.0, step_time_ms_by_group={"gemm": 60.0}, mfu_ratio=0.5
    )
    second = replace(
        training_of(), step_time_ms=80.0, step_time_ms_by_group={"moe": 70.0}, mfu_ratio=0.25
    )
    figures = {figure.label: figure for figure in compare_figures([first, second])}
    assert figures["step time"].values == (100.0, 80.0)
    assert figures["step time"].describe_ratio(1) == "0.8x, better"
    assert figures["MFU"].describe_ratio(1) == "0.5x, worse"
    assert figures["gemm in the step"].values == (60.0, 0.0)
    assert figures["moe in the step"].values == (0.0, 70.0)


def test_a_run_that_cannot_be_has_no_figures() -> None:
    refused = TrainingReport(feasibility=Feasibility(is_feasible=False, reason="too large"))
    figures = {figure.label: figure for figure in compare_figures([training_of(), refused])}
    assert figures["step time"].values[1] is None
    nothing = ServingReport(num_requests=3)
    latencies = compare_figures([serving_of(1.0), nothing])
    assert {figure.values[1] for figure in latencies if figure.label.startswith("TTFT")} == {None}


def test_figures_of_searches_are_those_of_their_best() -> None:
    """The candidate of the first rank, and how many were counted."""
    report = build_search()
    best = list(report.candidates.name).index(report.best)
    figures = {figure.label: figure.values for figure in compare_figures([report, report])}
    throughput = float(report.candidates.output_throughput_tps_per_gpu[best])
    assert figures["best: output tokens/s per GPU"] == (throughput, throughput)
    assert figures["points"] == (960.0, 960.0)
    training = build_training_search()
    counts = {figure.label: figure.values for figure in compare_figures([training, training])}
    assert counts["points"] == (float(training.num_points),) * 2


def test_figures_of_capacities_have_the_run_at_capacity() -> None:
    figures = {figure.label: figure.values for figure in compare_figures([build_capacity()] * 2)}
    assert figures["capacity"] == (10.0, 10.0)
    assert "at capacity: TPOT p50" in figures


def test_figures_of_whole_runs() -> None:
    """Days by what they are spent on: a share of 2 % of 46.5 days, and of twice as many."""
    slower = replace(RUN_REPORT, days=93.0, num_failures=0)
    figures = {figure.label: figure for figure in compare_figures([RUN_REPORT, slower])}
    assert figures["days, expected"].values == (46.5, 93.0)
    assert figures["days, expected"].describe_ratio(1) == "2x, worse"
    assert figures["steps done again"].values == pytest.approx((0.93, 1.86))
    assert figures["days p90"].values == (46.9, None)
    assert figures["cost"].values == (35_712.0, 35_712.0)


def test_whole_runs_that_overlap_are_told() -> None:
    """By the bounds of their days: 40 to 60 and 50 to 70 overlap, 61 to 70 does not."""
    near = replace(RUN_REPORT, days_low=50.0, days_high=70.0)
    far = replace(RUN_REPORT, days_low=61.0, days_high=70.0)
    runs = name_runs([keep(report, f"run-{n}") for n, report in enumerate((RUN_REPORT, near, far))])
    assert any(
        text.startswith("The interval of A overlaps with that of B. ")
        for text in list_remarks(runs)
    )


def test_searches_whose_best_overlap_are_told() -> None:
    """By tokens/s per device of the best that was simulated."""
    report = build_training_search()
    slow = [
        replace(
            finalist,
            report=replace(
                finalist.report,
                tokens_per_s_per_gpu=finalist.report.tokens_per_s_per_gpu / 100,
            ),
        )
        for finalist in report.finalists
    ]
    far = replace(report, finalists=tuple(slow))
    runs = name_runs([keep(one, f"s-{n}") for n, one in enumerate((report, report, far))])
    (overlap,) = [text for text in list_remarks(runs) if text.startswith("The interval of A")]
    assert overlap.startswith("The interval of A overlaps with that of B. ")


def test_steps_of_other_batches_are_not_compared_by_their_time() -> None:
    """Where the tokens of a step differ, its time does too."""
    other = [keep(training_of(global_batch_size=n), f"t-{n}") for n in (8, 16)]
    assert any(
        "tokens/s, not by the time of a step" in text for text in list_remarks(name_runs(other))
    )
    same = [keep(training_of(global_batch_size=8, pp=n), f"t-{n}") for n in (1, 2)]
    assert not any("time of a step" in text for text in list_remarks(name_runs(same)))


def test_how_much_was_simulated_names_no_search() -> None:
    runs = name_runs([keep(training_of(device=d, num_finalists=n), d) for n, d in enumerate("ab")])
    assert [run.words for run in runs] == ["device a", "device b"]


def test_runs_are_named_by_what_differs() -> None:
    """A few keys; where many differ by their titles, or by their jobs where these are alike."""
    few = name_runs([keep(training_of(layout={"pp": n}), f"t-{n}") for n in (1, 2)])
    assert [run.label for run in few] == ["A: pp 1", "B: pp 2"]
    many = [training_of(tp=n, pp=n + 2, dp=n + 4) for n in (1, 2)]
    titled = name_runs([keep(many[0], "t-1", "one"), keep(many[1], "t-2", "two")])
    assert [run.words for run in titled] == ["one", "two"]
    alike = name_runs([keep(many[0], "t-1", "one"), keep(many[1], "t-2", "one")])
    assert [run.words for run in alike] == ["t-1", "t-2"]


def test_keys_that_differ_alike_name_a_run_once() -> None:
    runs = name_runs([keep(training_of(device=d, space=d), d) for d in ("a30", "h100")])
    assert [run.words for run in runs] == ["device a30", "device h100"]


def test_kinds_cannot_be_mixed() -> None:
    """The error names both and says what they are."""
    mixed = [keep(training_of(), "t-1"), keep(serving_of(1.0), "s-1")]
    with pytest.raises(InvalidRequestError, match=r"t-1 is a training step, s-1 is a simulated"):
        name_runs(mixed)


@pytest.mark.parametrize("count", [1, 7])
def test_so_many_cannot_be_told_apart(count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"2 to 6 results, not {count}"):
        name_runs([keep(training_of(), f"t-{place}") for place in range(count)])


def test_remarks_tell_of_intervals_that_overlap() -> None:
    """Those that do not touch are not reported."""
    bounds = ((90.0, 120.0), (110.0, 130.0), (121.0, 140.0))
    runs = name_runs(
        [
            keep(replace(training_of(pp=n), step_time_low_ms=low, step_time_high_ms=high), f"t-{n}")
            for n, (low, high) in enumerate(bounds)
        ]
    )
    (remark,) = list_remarks(runs)
    assert remark.startswith("The interval of A overlaps with that of B. ")


def test_equal_configurations_are_told() -> None:
    runs = name_runs([keep(serving_of(1.0, tp=1), f"s-{place}") for place in range(2)])
    assert ["The configurations are the same."] == list(list_remarks(runs))


def test_warnings_tell_of_other_estimates_and_of_what_cannot_run() -> None:
    refused = Feasibility(is_feasible=False, reason="no memory")
    other = replace(training_of(pp=2), model_version="v2", feasibility=refused)
    runs = name_runs([keep(replace(training_of(), model_version="v1"), "t"), keep(other, "u")])
    cannot, versions = list_warnings(runs)
    assert cannot == "B cannot run: no memory."
    assert "(A by v1, B by v2)" in versions


def test_a_change_holds_a_value_for_every_run() -> None:
    (change,) = list_changes(['{"a": 1}', '{"a": 2}', "{}"])
    assert change == Change(path="a", values=("1", "2", "-"))
