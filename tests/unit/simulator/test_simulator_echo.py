"""What answers of serving say of how far others like them were off."""

from dataclasses import replace

import pytest
from search_reports import build_search, build_search_request

from foretoken.domain.requests.search import ServingSearchReport, ServingSearchRequest
from foretoken.domain.results.echo import Echo
from foretoken.simulator.echo import echo_serving_search

_MEASURED = {"interpolated": 1.0}


@pytest.fixture
def request_of_both() -> ServingSearchRequest:
    request = build_search_request()
    return replace(request, space=replace(request.space, devices=("h200_sxm", "b200")))


@pytest.mark.parametrize(("best", "is_named"), [("b200", True), ("h200_sxm", False)])
def test_the_expected_error_is_that_of_the_best_deployments_device(
    request_of_both: ServingSearchRequest, best: str, is_named: bool
) -> None:
    report = _estimated(build_search())
    names = report.candidates.name
    devices = [best if name == report.best else "a100_sxm_80" for name in names]
    report = replace(report, candidates=replace(report.candidates, device=devices))
    said = echo_serving_search(request_of_both, report).echo.accuracy
    assert is_named == ("on a Blackwell device" in said)
    assert "TPOT" in said


def test_devices_that_differ_have_the_line_of_any(request_of_both: ServingSearchRequest) -> None:
    report = replace(_estimated(build_search()), best="")
    said = echo_serving_search(request_of_both, report).echo.accuracy
    assert "on a device with measured operators" in said


def _estimated(report: ServingSearchReport) -> ServingSearchReport:
    return replace(report, finalists=(), echo=Echo.of_estimate("the best", _MEASURED))
