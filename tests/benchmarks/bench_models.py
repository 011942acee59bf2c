"""All configurations of current models: read, counted, placed on 8 H200, a decoding step.

The files are Hugging Face configurations as AIConfigurator bundles them, the operators' times that
tool's tables of three GPUs, imported as a user imports them and learned when they are asked about.
A model is judged on the first device whose tables cover (measured or interpolated) four fifths of
its steps with 1 and with 64 requests, or else on the one that covers most. Prints the table of
`docs/reference/models.md`, then of each model below four fifths which operators are not covered,
and on which of the devices they are.

    python tests/benchmarks/bench_models.py [path of the shared measurements]
        [--home FOLDER] [--devices SKU,...] [--engine PROFILE] [--only TEXT]
"""

import argparse
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import BatchShape, DecodeShape, OperatorNode
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.measurements.estimate import LatencyColumns, LatencyQuery, Provenance
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.description import ModelFigures, describe_model
from foretoken.domain.models.hf_config import load_hf_config
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.answer import Questions, covered_rows
from foretoken.simulator.cost.latency_surfaces import replica_ranks, surface_spec
from foretoken.simulator.cost.substitute import Substitute, find_folded
from foretoken.simulator.serving.feasibility import judge_feasibility

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_BATCHES, _CONTEXT = np.array([1, 64]), 2048
# In this order; those of more than 8 devices tell the step of models that do not fit on 8.
_LAYOUTS = (
    *(ParallelLayout(tp=tp) for tp in (1, 2, 4, 8)),
    *(ParallelLayout(tp=8, pp=pp) for pp in (2, 4)),
)
_NODE, _NODE_DEVICE = 8, "h200_sxm"
_GOAL = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A decoding step on the layout that fits: by batch its time, and the share that is covered.

    `uncovered_us` is what operators take whose times are not, by what they are and do and by why;
    `covered` are operators whose times are.
    """

    device: str
    layout: ParallelLayout
    latency_us: np.ndarray
    covered_ratio: np.ndarray
    uncovered_us: dict[tuple[str, str], np.ndarray]
    covered: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A model with its steps by device, and the one it is judged by."""

    name: str
    figures: ModelFigures
    steps: dict[str, _Step]
    judged: _Step


def main() -> None:
    """Print the table, then what is not covered."""
    options = _parser().parse_args()
    files = sorted(
        path
        for path in (options.data / "model_configs").glob("*_config.json")
        if not path.stem.endswith("hf_quant_config") and options.only.lower() in path.name.lower()
    )
    if not files:
        print(f"skipped: no configurations of models in {options.data}")
        return
    start_s = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        home = options.home or Path(scratch)
        with Composition(AppConfig(home=str(home))) as services:
            systems = options.data / "aiconfigurator" / "systems"
            for device in options.devices:
                _import_tables(services, systems, device)
            rows = [_judge(file, options, services.predictor) for file in files]
            known = {item.operator for item in services.catalog.describe_coverage()}
    _print_table(rows)
    _print_uncovered(rows)
    _print_summary(rows, known)
    print(f"{time.process_time() - start_s:.0f} CPU s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("data", nargs="?", type=Path, default=_DATA)
    parser.add_argument("--home", type=Path, help="kept, and used as it is where it is there")
    parser.add_argument(
        "--devices", type=lambda text: text.split(","), default=["h200_sxm", "h100_sxm", "b200_sxm"]
    )
    parser.add_argument("--engine", default="vllm-0.24")
    parser.add_argument("--only", default="", help="models whose names have this in them")
    return parser


_Formatter = argparse.RawDescriptionHelpFormatter


def _import_tables(services: Composition, systems: Path, device: str) -> None:
    if any(found.name == find_device(device).name for found in services.catalog.list_devices()):
        return
    plan = find_importer("aiconfigurator").read(ImportRequest(path=systems, device=device))
    num_flagged = sum(r.num_flagged for r in services.catalog.record(plan.run, plan.batches))
    print(f"{plan.num_rows:,} rows of {device}, {num_flagged:,} flagged")


def _judge(file: Path, options: argparse.Namespace, predictor: PredictorPort) -> _Row:
    model = load_hf_config(file)
    found = (_find_step(model, device, options.engine, predictor) for device in options.devices)
    steps = {step.device: step for step in found}
    best = max(steps.values(), key=lambda step: step.covered_ratio.min())
    enough = (step for step in steps.values() if step.covered_ratio.min() >= _GOAL)
    name = re.sub("^.*?--|_config.json$", "", file.name)
    figures = describe_model(model)
    return _Row(name=name, figures=figures, steps=steps, judged=next(enough, best))


def _find_step(
    model: ModelArchitecture, device: str, engine: str, predictor: PredictorPort
) -> _Step:
    """Return the step on the first layout that fits."""
    problem = ""
    for layout in _LAYOUTS:
        spec = EngineSpec(profile=engine)
        scenario = ServingScenario(model=model, device=device, layout=layout, engine=spec)
        _, problem = judge_feasibility(scenario, scenario.resolve_engine())
        if not problem:
            return _price_step(scenario, predictor)
    raise InvalidRequestError(f"{model.name} runs nowhere on {device}: {problem}")


def _price_step(scenario: ServingScenario, predictor: PredictorPort) -> _Step:
    """Price the operators of a step, the stages of a pipeline one after the other."""
    spec = surface_spec(scenario, 2 * _CONTEXT)
    contexts = _BATCHES * _CONTEXT
    shape = BatchShape(
        num_tokens=_BATCHES,
        num_output_rows=_BATCHES,
        decode=DecodeShape(
            num_seqs=_BATCHES, kv_tokens=contexts, kv_tokens_max=np.full_like(contexts, _CONTEXT)
        ),
    )
    nodes = [node for r in replica_ranks(spec) for node in lower_rank(shape, spec.options, r)]
    ways = [Substitute(node, spec, np.ones(len(_BATCHES), dtype=np.bool_)) for node in nodes]
    questions = Questions()
    for way in ways:
        way.ask(questions)
    query = LatencyQuery(
        device=spec.device,
        tables=questions.tables,
        preferred_framework=spec.software,
        prefer_measured=True,
    )
    found = questions.match(predictor.predict(query).tables)
    priced = [(node, way.answer(found)) for node, way in zip(nodes, ways, strict=True)]
    folded = find_folded(priced)
    return _add_up(scenario, [pair for pair in priced if pair[0].role not in folded])


def _add_up(
    scenario: ServingScenario, priced: Sequence[tuple[OperatorNode, LatencyColumns]]
) -> _Step:
    total, covered_us = np.zeros(len(_BATCHES)), np.zeros(len(_BATCHES))
    uncovered: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(len(_BATCHES)))
    covered: set[str] = set()
    for node, answer in priced:
        time_us = node.repeat * np.broadcast_to(answer.latency_us, total.shape)
        is_covered = np.broadcast_to(covered_rows(answer), total.shape)
        total += time_us
        covered_us += time_us * is_covered
        variant = f" {node.variant}" if node.variant else ""
        what = f"{node.operator} {node.dtype.name.lower()}{variant}"
        if is_covered.all():
            covered.add(what)
            continue
        found = np.unique(np.broadcast_to(answer.provenance, total.shape)[~is_covered])
        why = ", ".join(Provenance(int(each)).name.lower() for each in found)
        uncovered[what, why] += time_us * ~is_covered
    return _Step(
        device=scenario.device,
        layout=scenario.layout,
        latency_us=total,
        covered_ratio=covered_us / total,
        uncovered_us=dict(uncovered),
        covered=frozenset(covered - {what for what, _ in uncovered}),
    )


def _print_table(rows: Sequence[_Row]) -> None:
    print("\n| model | 10^9 | GiB | 8 H200 | judged on | ms at 1 | ms at 64 |")
    print("|---|---|---|---|---|---|---|")
    alike: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        figures, step = row.figures, row.judged
        node = row.steps.get(_NODE_DEVICE)
        fits = "" if node is None else _say(node.layout)
        times = zip(step.latency_us / 1e3, step.covered_ratio, strict=True)
        cells = (
            f"{figures.num_parameters / 1e9:,.1f} / {figures.num_active / 1e9:.1f}",
            f"{figures.num_bytes / 2**30:,.0f}",
            f"no: {fits}" if node is not None and node.layout.num_devices > _NODE else fits,
            f"{step.device.partition('_')[0].upper()} {_say(step.layout)}",
            *(f"{time_ms:.1f} ({ratio:.0%})" for time_ms, ratio in times),
        )
        alike[" | ".join(cells)].append(row.name)
    for line, names in alike.items():
        print(f"| {', '.join(names)} | {line} |")


def _say(layout: ParallelLayout) -> str:
    return f"tp{layout.tp}" + (f"·pp{layout.pp}" if layout.pp > 1 else "")


def _print_uncovered(rows: Sequence[_Row]) -> None:
    below = [row for row in rows if row.judged.covered_ratio.min() < _GOAL]
    print(f"\nbelow {_GOAL:.0%} with 1 or with 64 requests: shares of both that are not covered")
    for row in below:
        print(f"{row.name} on {row.judged.device}")
        ordered = sorted(row.judged.uncovered_us.items(), key=lambda item: -item[1].sum())
        for (what, why), time_us in ordered:
            shares = "".join(f"{share:8.1%}" for share in time_us / row.judged.latency_us)
            others = [device for device, step in row.steps.items() if what in step.covered]
            print(f"  {shares}  {what}: {why}; covered on {', '.join(others) or 'none of them'}")


def _print_summary(rows: Sequence[_Row], known: set[str]) -> None:
    """Print how much is covered by device and as judged, also of operators that any table has."""
    for device in rows[0].steps:
        _print_ratios(device, [row.steps[device].covered_ratio for row in rows])
    _print_ratios("as judged", [row.judged.covered_ratio for row in rows])
    share: dict[str, float] = defaultdict(float)
    of_known = []
    for row in rows:
        step, unknown_us = row.judged, np.zeros(len(_BATCHES))
        for (what, _), time_us in step.uncovered_us.items():
            share[what] += float((time_us / step.latency_us).mean()) / len(rows)
            unknown_us += time_us * (what.partition(" ")[0] not in known)
        of_known.append(step.covered_ratio / (1 - unknown_us / step.latency_us))
    _print_ratios("as judged, of operators that any table has", of_known)
    print("not covered, mean share of a step over models and batches, as judged:")
    for what, ratio in sorted(share.items(), key=lambda item: -item[1])[:20]:
        print(f"  {ratio:6.2%}  {what}")


def _print_ratios(name: str, steps: Sequence[np.ndarray]) -> None:
    said = [
        f"batch {batch}: median {np.median(ratio):.1%}, least {ratio.min():.1%},"
        f" below {_GOAL:.0%} {sum(ratio < _GOAL)} of {len(ratio)}"
        for batch, ratio in zip(_BATCHES, np.array(steps).T, strict=True)
    ]
    print(f"{name}: {'; '.join(said)}")


if __name__ == "__main__":
    main()
