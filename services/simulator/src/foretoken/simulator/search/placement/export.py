"""Write the strategies of a finished search with the columns of FASOP, as CSV or JSON lines.

`partition` and `partition_layers` both have the layers of every stage, of all its chunks together:
FASOP has no chunks, and cuts between operators, which it counts in the first. `gpu_cluster` counts
nodes. All strategies listed have the memory, so `is_oom` is false, and `oom_gpumem(GB)` is what the
fullest device reserves, in GiB. A run is `num_tokens` long, by default one step.
Source: ai-computing/aicomp, fasop/README.md at 009beb0 (columns, and the form of JSON lines).
"""

import csv
import json
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.units import GIB, MS_PER_S, S_PER_HOUR
from foretoken.simulator.rank import links_of

COLUMNS = (
    "index",
    "gbs",
    "mbs",
    "tp",
    "dp",
    "pp",
    "node_type",
    "gpu_cluster",
    "partition",
    "partition_layers",
    "step_time(s)",
    "throughput(samples/s)",
    "price_per_step($)",
    "is_oom",
    "oom_gpumem(GB)",
    "iterations",
    "total_time(s)",
    "total_time(h)",
    "cost($)",
    "rank",
)
# Names in JSON lines where they differ; lines have no rank, and no second partition.
_LINE_NAMES = {
    "gpu_cluster": "gpu_cluster_str",
    "step_time(s)": "step_time",
    "throughput(samples/s)": "throughput",
    "price_per_step($)": "price_per_step",
    "oom_gpumem(GB)": "oom_gpumem",
    "total_time(s)": "total_time_seconds",
    "total_time(h)": "total_time_hours",
    "cost($)": "cost",
}
_NOT_IN_LINES = ("partition_layers", "rank")
_ENDINGS = (".csv", ".jsonl")


def check_fasop_path(path: Path) -> Path:
    """Return the path of a file to write.

    Raises:
        InvalidRequestError: it ends neither in `.csv` nor in `.jsonl`.

    """
    if path.suffix not in _ENDINGS:
        raise InvalidRequestError(f"{path} must end in {' or '.join(_ENDINGS)}")
    return path


def write_fasop(report: TrainingSearchReport, path: Path, num_tokens: float = 0.0) -> None:
    """Write the candidates of a report, by throughput, best first.

    Raises:
        InvalidRequestError: the file has another ending than `.csv` or `.jsonl`.
        OSError: it cannot be written.

    """
    check_fasop_path(path)
    rows = list_rows(report, num_tokens)
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
            return
        file.write(json.dumps(_meta(rows)) + "\n")
        file.writelines(json.dumps(_line(row)) + "\n" for row in rows)


def list_rows(report: TrainingSearchReport, num_tokens: float = 0.0) -> list[dict[str, Any]]:
    """Return the candidates of a report as FASOP names their figures, best throughput first."""
    if not len(report.candidates.name):
        return []
    scenario = schema.decode(
        TrainingScenario, json.loads(report.request_json)["scenario"], "request.scenario"
    )
    rows = list(_rows(report, scenario, num_tokens))
    rows.sort(key=lambda row: -row["throughput(samples/s)"])
    return [{**row, "rank": place} for place, row in enumerate(rows, 1)]


def _rows(
    report: TrainingSearchReport, scenario: TrainingScenario, num_tokens: float
) -> Iterator[dict[str, Any]]:
    table = report.candidates
    for index in range(len(table.name)):
        batch = int(table.global_batch_size[index])
        step_s = float(table.step_time_ms[index]) / MS_PER_S
        steps = ceil(num_tokens / (batch * scenario.sequence_length)) or 1
        nodes = _count_nodes(str(table.device[index]), int(table.num_devices[index]), scenario)
        chunks = [int(count) for count in str(table.stage_layers[index]).split(",") if count]
        pp = int(table.pp[index])
        layers = [sum(chunks[stage::pp]) for stage in range(pp)] if chunks else []
        usd = float(table.usd_per_step[index])
        yield {
            "index": index,
            "gbs": batch,
            "mbs": int(table.micro_batch_size[index]),
            "tp": int(table.tp[index]),
            "dp": int(table.dp[index]),
            "pp": pp,
            "node_type": [name for name, count in nodes.items() for _ in range(count)],
            "gpu_cluster": ",".join(f"{name}:{count}" for name, count in nodes.items()),
            "partition": layers,
            "partition_layers": layers,
            "step_time(s)": step_s,
            "throughput(samples/s)": batch / step_s,
            "price_per_step($)": usd,
            "is_oom": False,
            "oom_gpumem(GB)": float(table.reserved_bytes[index]) / GIB,
            "iterations": steps,
            "total_time(s)": steps * step_s,
            "total_time(h)": steps * step_s / S_PER_HOUR,
            "cost($)": steps * usd,
        }


def _count_nodes(device: str, num_devices: int, scenario: TrainingScenario) -> dict[str, int]:
    """Return the nodes by device: as a mixed cluster's search names them, or what devices fill."""
    groups = [part.partition(" ") for part in device.split(" + ")]
    if all(count.isdigit() and name for count, _, name in groups):
        return {name: int(count) for count, _, name in groups}
    return {device: ceil(num_devices / links_of(scenario, device).devices_per_node)}


def _meta(rows: list[dict[str, Any]]) -> Mapping[str, Any]:
    largest = max(rows, key=lambda row: len(row["node_type"]), default=None)
    names = [] if largest is None else largest["node_type"]
    return {
        "type": "meta",
        "total_count": len(rows),
        "gbs": 0 if largest is None else largest["gbs"],
        "cluster": {name: names.count(name) for name in dict.fromkeys(names)},
    }


def _line(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {_LINE_NAMES.get(name, name): row[name] for name in COLUMNS if name not in _NOT_IN_LINES}
