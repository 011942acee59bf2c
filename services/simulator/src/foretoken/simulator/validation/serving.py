"""A measured serving run against its simulation: figures, where the error sits, what to do."""

from dataclasses import dataclass

from foretoken.domain.requests.serving_run import ServingRun
from foretoken.domain.results.report import ServingReport
from foretoken.simulator.validation.comparison import (
    MetricComparison,
    RateComparison,
    RequestComparison,
    compare_metrics,
    compare_rates,
    compare_requests,
    find_worst,
    pair_up,
)
from foretoken.simulator.validation.decode_step import DecodeComparison, compare_decode
from foretoken.simulator.validation.finding import (
    Finding,
    find_all,
    find_of_estimates,
    find_of_server,
)
from foretoken.simulator.validation.residual import ComponentError, split_residual


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingValidation:
    """How a simulation compares with a measured run.

    `num_failed` requests were not answered in the run, `num_unfinished` not in the simulation;
    both are left out. `worst` are the requests furthest off.
    """

    run_name: str
    source: str
    num_compared: int
    num_failed: int
    num_unfinished: int
    metrics: tuple[MetricComparison, ...]
    rates: tuple[RateComparison, ...]
    components: tuple[ComponentError, ...]
    decode: DecodeComparison | None
    findings: tuple[Finding, ...]
    worst: tuple[RequestComparison, ...]
    requests: tuple[RequestComparison, ...]


def validate_serving(run: ServingRun, report: ServingReport) -> ServingValidation:
    """Compare a run with the report of the simulation of `scenario_of_run`.

    Raises:
        InvalidRequestError: the simulation is infeasible or of other requests.

    """
    pair = pair_up(run, report)
    metrics, rates = compare_metrics(pair, report), compare_rates(pair)
    components, decode = split_residual(pair), compare_decode(pair)
    requests = compare_requests(pair)
    overall, *others = find_all(metrics, rates, components, decode)
    findings = (overall, *find_of_estimates(report), *others, *find_of_server(run, report))
    return ServingValidation(
        run_name=run.name,
        source=run.source,
        num_compared=len(requests),
        num_failed=run.num_failed,
        num_unfinished=pair.num_unfinished,
        metrics=metrics,
        rates=rates,
        components=components,
        decode=decode,
        findings=findings,
        worst=find_worst(requests),
        requests=requests,
    )
