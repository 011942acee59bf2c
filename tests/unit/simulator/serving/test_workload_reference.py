"""The examples of the reference are workloads that resolve."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.domain import schema
from foretoken.domain.plugins import parse_yaml, scan_modules
from foretoken.domain.requests.slo import SloClass
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.workload.requests import resolve_workload
from foretoken.simulator.workload.trace import load_trace

_DOCS = Path(__file__).resolve().parents[4] / "docs"
_PAGE = (_DOCS / "reference" / "workloads.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL)


@pytest.mark.parametrize("text", _BLOCKS)
def test_every_example_resolves(text: str) -> None:
    content = parse_yaml(text, "workloads.md")
    workload = dict(content["workload"])
    # As scenario files do: options travel as text.
    options = workload.get("arrival_options", {})
    workload["arrival_options"] = {name: json.dumps(value) for name, value in options.items()}
    spec = schema.decode(WorkloadSpec, workload)
    classes = [schema.decode(SloClass, item) for item in content.get("slo_classes", [])]
    if spec.arrival == "trace":
        trace = load_trace(_DOCS / "examples" / spec.trace_path, spec.trace_format)
        spec = replace(
            spec, trace_requests=trace.requests, hash_block_tokens=trace.hash_block_tokens
        )
    assert resolve_workload(spec, classes, 0).num_requests > 0


@pytest.mark.parametrize(
    ("folder", "attribute"), [("arrivals", "ARRIVAL"), ("lengths", "LENGTH"), ("traces", "TRACE")]
)
def test_every_plug_in_is_listed(folder: str, attribute: str) -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", _PAGE, re.MULTILINE))
    assert set(scan_modules(f"foretoken.simulator.workload.{folder}", attribute)) <= listed
