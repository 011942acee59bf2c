"""What a search simulated, as a scenario that can be simulated again."""

import json

from foretoken.domain import schema
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import Finalist, ServingSearchReport

_TRACE = "trace_requests"


def read_finalist(report: ServingSearchReport, finalist: Finalist) -> ServingScenario:
    """Return what a finalist of a report was simulated as.

    A trace, which may be long, stands once in the request and not in every finalist.
    """
    content = json.loads(finalist.scenario_json)
    asked = json.loads(report.request_json or "{}").get("scenario", {}).get("workload", {})
    workload = content.get("workload", {})
    if asked.get(_TRACE) and not workload.get(_TRACE):
        content["workload"] = {**workload, _TRACE: asked[_TRACE]}
    return schema.decode(ServingScenario, content)
