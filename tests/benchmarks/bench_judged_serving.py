"""Compare simulations with the measured serving runs that nothing here was developed with.

The wheel `aisimulate` has a table of measured runs. Those of the models of `measured_serving.csv`
are left out: `bench_serving_closed_loop.py` has them. Of the others those that are aggregated are
simulated as `foretoken validate serving --against installed` does, on the home that is given: after
`foretoken catalog install nvidia` on all that a user imports, else on the starter; series are
learned when they are asked for. To be printed once, at the end of a development.

    python tests/benchmarks/bench_judged_serving.py WHEEL [--home FOLDER] [--runs N]
        [--devices h200_sxm,h100_sxm,b200]
"""

import argparse
import csv
import io
import statistics
import sys
import tempfile
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.app.starter import with_starter
from foretoken.domain.alias import canonical_device
from foretoken.simulator.validation.published_comparison import (
    PublishedOutcome,
    compare_published,
    draw_runs,
)
from foretoken.simulator.validation.published_run import PublishedRun, read_published

_TABLE = "aisimulate_core/systems/silicon_sample.csv"
# Models with which serving was developed.
_DEVELOPMENT = {
    "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-120b",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "nvidia/Llama-3.1-8B-Instruct-FP8",
}


def main() -> int:
    """Read, draw, simulate and print."""
    options = _parse_options()
    devices = {canonical_device(name) for name in options.devices.split(",")}
    runs = [run for run in _read_judged(options.wheel) if run.device in devices]
    drawn = draw_runs(runs, options.runs)
    print(f"{len(drawn)} of {len(runs)} measured runs of other models on {options.devices}")
    with tempfile.TemporaryDirectory() as scratch:
        home = options.home or Path(scratch) / "home"
        config = with_starter(AppConfig(home=str(home)), {})
        started, outcomes = time.process_time(), []
        with Composition(config) as services:
            foretoken = services.foretoken("simulator")
            for outcome in compare_published(drawn, foretoken.simulate_serving):
                outcomes.append(outcome)
                print(_describe(outcome), flush=True)
    print(f"learned and simulated in {time.process_time() - started:.0f} CPU s")
    _print_groups(outcomes)
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="NVIDIA's wheel `aisimulate`")
    parser.add_argument("--home", type=Path, help="a home with NVIDIA's tables; else the starter")
    parser.add_argument("--runs", type=int, default=12, help="most of a model, engine and device")
    parser.add_argument("--devices", default="h200_sxm,h100_sxm,b200", help="of which devices")
    return parser.parse_args()


def _read_judged(wheel: Path) -> list[PublishedRun]:
    """Return the aggregated runs of models that are not for development.

    Some rows are a development model's run again, under the name of a model of the same shape.
    """
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(_TABLE)
    rows = csv.DictReader(io.StringIO(content.decode()))
    known = {_figures_of(row) for row in rows if row["model_path"] in _DEVELOPMENT}
    runs = {run.name: run for run in read_published(content)}
    rows = csv.DictReader(io.StringIO(content.decode()))
    return [runs[row["id"]] for row in rows if row["id"] in runs and _figures_of(row) not in known]


def _figures_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """Return lengths and times of a run, in the digits that every table has."""
    times_ms = (row["silicon_ttft_ms"], row["silicon_tpot_ms"])
    return (row["isl"], row["osl"], *(f"{float(time_ms or 0):.2f}" for time_ms in times_ms))


def _describe(outcome: PublishedOutcome) -> str:
    if outcome.reason:
        return f"{outcome.run.name}: not run, {outcome.reason}"
    return (
        f"{outcome.run.name}: TPOT {outcome.tpot_ms:.2f} of {outcome.run.tpot_ms:.2f} ms,"
        f" TTFT {outcome.ttft_ms:.0f} of {outcome.run.ttft_ms:.0f} ms"
    )


def _print_groups(outcomes: Sequence[PublishedOutcome]) -> None:
    groups: dict[tuple[str, str, str], list[PublishedOutcome]] = defaultdict(list)
    for outcome in outcomes:
        run = outcome.run
        groups[run.model, run.engine, run.device].append(outcome)
    print(f"\n{'':44}{'rows':>5}{'TPOT mean':>11}{'median':>8}{'bias':>8}", end="")
    print(f"{'TTFT mean':>11}{'median':>8}{'bias':>8}")
    for key, members in (*sorted(groups.items()), (("all",), list(outcomes))):
        done = [member for member in members if not member.reason]
        if done:
            tpot = _sum_up([member.tpot_error_ratio for member in done])
            ttft = _sum_up([member.ttft_error_ratio for member in done])
            print(f"{' '.join(key):44}{len(done):5}{tpot}{ttft}")
    reasons = Counter(outcome.reason for outcome in outcomes if outcome.reason)
    for reason, count in reasons.most_common():
        print(f"not run: {count} rows, {reason}")


def _sum_up(errors: Sequence[float]) -> str:
    sizes = list(map(abs, errors))
    mean, middle = statistics.fmean(sizes), statistics.median(sizes)
    return f"{mean:11.1%}{middle:8.1%}{statistics.fmean(errors):+8.1%}"


if __name__ == "__main__":
    sys.exit(main())
