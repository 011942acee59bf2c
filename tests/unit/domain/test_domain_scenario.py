"""Scenarios that mean nothing are refused where they are written, not where they run."""

from typing import Any

import pytest

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.workload import WorkloadSpec


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"seed": -1}, "seed"),
        ({"slo": {"ttft_ms": -1.0}}, "slo.ttft_ms"),
        ({"slo": {"itl_ms": float("nan")}}, "slo.itl_ms"),
        ({"slo": {"itl_percentile": 200}}, "slo.itl_percentile"),
        ({"workload": {"rate_rps": 0}}, "workload.rate_rps"),
        ({"workload": {"num_requests": 0}}, "workload.num_requests"),
        ({"workload": {"max_tokens_per_request": -1}}, "workload.max_tokens_per_request"),
        ({"workload": {"prefill": {"mean": -3}}}, "workload.prefill.mean"),
        ({"layout": {"tp": 0}}, "layout.tp"),
    ],
)
def test_a_value_that_means_nothing_names_its_place(part: dict[str, Any], place: str) -> None:
    content = {"model": find_model("tiny-llama"), "device": "cpu", **part}
    with pytest.raises(InvalidRequestError) as caught:
        schema.decode(ServingScenario, content)
    assert [place] == [violation.field for violation in caught.value.violations]


def test_zero_is_no_limit() -> None:
    assert Slo() == Slo(ttft_ms=0.0, tpot_ms=0.0, itl_ms=0.0, e2e_latency_ms=0.0)
    assert WorkloadSpec().max_tokens_per_request == 0
