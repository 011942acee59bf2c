"""All configurations of current models: read, counted, placed on 8 devices, a decoding step.

The files are Hugging Face configurations as AIConfigurator bundles them, the operators' times that
tool's tables of the GPU, imported as a user imports them and learned when they are asked about.
Prints a line a model: parameters, bytes as stored, the first layout that fits, the time of a
decoding step of 1 and 64 requests, and the share of it that rests on measurements of the device
(measured or interpolated); then which operators do not, by the time they take.

    python tests/benchmarks/bench_models.py [path of the shared measurements]
        [--home FOLDER] [--device SKU] [--engine PROFILE] [--only TEXT] [--operators]
"""

import argparse
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.domain.errors import ForetokenError
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
_NODE = 8
_GOAL = 0.8


@dataclass(frozen=True, slots=True)
class _Where:
    """What runs the models, and who knows its times."""

    device: str
    engine: str
    predictor: PredictorPort


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A decoding step on the layout that fits: by batch its time, and the share that is covered.

    `uncovered_us` is what operators take whose times are not, by what they are and do.
    """

    layout: ParallelLayout
    latency_us: np.ndarray
    covered_ratio: np.ndarray
    uncovered_us: dict[tuple[str, str], np.ndarray]


def main() -> None:
    """Print the table, then a summary."""
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
            _import_tables(services, systems, options.device)
            where = _Where(options.device, options.engine, services.predictor)
            steps = dict(_rows(files, where))
    _print_summary(steps, has_operators=options.operators)
    print(f"{time.process_time() - start_s:.0f} CPU s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("data", nargs="?", type=Path, default=_DATA)
    parser.add_argument("--home", type=Path, help="kept, and used as it is where it is there")
    parser.add_argument("--device", default="h200_sxm")
    parser.add_argument("--engine", default="vllm-0.24")
    parser.add_argument("--only", default="", help="models whose names have this in them")
    parser.add_argument("--operators", action="store_true", help="name them for each model")
    return parser


_Formatter = argparse.RawDescriptionHelpFormatter


def _import_tables(services: Composition, systems: Path, device: str) -> None:
    if any(found.name == find_device(device).name for found in services.catalog.list_devices()):
        return
    plan = find_importer("aiconfigurator").read(ImportRequest(path=systems, device=device))
    num_flagged = sum(r.num_flagged for r in services.catalog.record(plan.run, plan.batches))
    print(f"{plan.num_rows:,} rows of {device}, {num_flagged:,} flagged")


def _rows(files: Sequence[Path], where: _Where) -> Iterator[tuple[str, _Step]]:
    print(
        f"{'model':52}{'1e9':>8}{'active':>8}{'GiB':>8}  {'layout':9}"
        f"{'ms, 1':>8}{'covered':>9}{'ms, 64':>8}{'covered':>9}"
    )
    for path in files:
        name = re.sub("^.*?--|_config.json$", "", path.name)
        figures, model = _read(path)
        step = _find_step(model, where)
        print(
            f"{name:52}{figures.num_parameters / 1e9:8.1f}{figures.num_active / 1e9:8.1f}"
            f"{figures.num_bytes / 2**30:8.1f}  {_describe(step)}",
            flush=True,
        )
        if isinstance(step, _Step):
            yield name, step


def _read(path: Path) -> tuple[ModelFigures, ModelArchitecture]:
    model = load_hf_config(path)
    return describe_model(model), model


def _describe(step: _Step | str) -> str:
    if isinstance(step, str):
        return step
    layout = f"tp{step.layout.tp}" + (f" pp{step.layout.pp}" if step.layout.pp > 1 else "")
    times = zip(step.latency_us / 1e3, step.covered_ratio, strict=True)
    shown = "".join(f"{time_ms:8.2f}{ratio:9.1%}" for time_ms, ratio in times)
    return f"{layout:9}{shown}" + ("" if step.layout.num_devices <= _NODE else "  not on 8")


def _find_step(model: ModelArchitecture, where: _Where) -> _Step | str:
    """Return the step on the first layout that fits, or why there is none."""
    problem = ""
    for layout in _LAYOUTS:
        scenario = ServingScenario(
            model=model,
            device=where.device,
            layout=layout,
            engine=EngineSpec(profile=where.engine),
        )
        try:
            _, problem = judge_feasibility(scenario, scenario.resolve_engine())
            if not problem:
                return _price_step(scenario, where.predictor)
        except ForetokenError as err:
            problem = err.message
    return problem


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
    return _add_up(scenario.layout, [pair for pair in priced if pair[0].role not in folded])


def _add_up(layout: ParallelLayout, priced: Sequence[tuple[OperatorNode, LatencyColumns]]) -> _Step:
    total, covered = np.zeros(len(_BATCHES)), np.zeros(len(_BATCHES))
    uncovered: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(len(_BATCHES)))
    for node, answer in priced:
        time_us = node.repeat * np.broadcast_to(answer.latency_us, total.shape)
        is_covered = np.broadcast_to(covered_rows(answer), total.shape)
        total += time_us
        covered += time_us * is_covered
        if not is_covered.all():
            why = {Provenance(int(p)).name.lower() for p in np.unique(answer.provenance)}
            variant = f" {node.variant}" if node.variant else ""
            what = f"{node.operator} {node.dtype.name.lower()}{variant}"
            uncovered[what, ", ".join(sorted(why - {"measured", "interpolated"}))] += (
                time_us * ~is_covered
            )
    return _Step(
        layout=layout,
        latency_us=total,
        covered_ratio=covered / total,
        uncovered_us=dict(uncovered),
    )


def _print_summary(steps: dict[str, _Step], *, has_operators: bool) -> None:
    if has_operators:
        for name, step in steps.items():
            print(f"\n{name}")
            ordered = sorted(step.uncovered_us.items(), key=lambda item: -item[1].sum())
            for (what, why), time_us in ordered:
                shares = "".join(f"{share:8.1%}" for share in time_us / step.latency_us)
                print(f"  {shares}  {what}: {why}")
    ratios = np.array([step.covered_ratio for step in steps.values()])
    for column, batch in enumerate(_BATCHES):
        below = sum(ratios[:, column] < _GOAL)
        print(
            f"batch {batch}: median {np.median(ratios[:, column]):.1%} of the time is covered,"
            f" least {ratios[:, column].min():.1%}; below {_GOAL:.0%}: {below} of {len(ratios)}"
        )
    share: dict[str, float] = defaultdict(float)
    for step in steps.values():
        for (what, _), time_us in step.uncovered_us.items():
            share[what] += float((time_us / step.latency_us).mean()) / len(steps)
    print("not covered, mean share of a step over models and batches:")
    for what, ratio in sorted(share.items(), key=lambda item: -item[1])[:20]:
        print(f"  {ratio:6.2%}  {what}")


if __name__ == "__main__":
    main()
