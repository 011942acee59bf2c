"""Error of composing a training step from its measured components.

Run: python tests/benchmarks/bench_training_composition.py [DATA_FOLDER]

The jobs ran GPT-NeoX on DeepSpeed, whose blocking sends and receives follow each other. Stage times
and gradient reductions are those measured in the fastest profiled step; a transfer is its shortest
occurrence, since the others contain waiting. What is left out was not measured: the loss, and the
gather of a received activation. So the error is that of the composition alone.
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from foretoken.simulator.steps.pipelines.events import ChunkTimes, LinkRules, run_pipeline
from foretoken.simulator.steps.pipelines.schedule import find_schedule

_DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_STAGES = ("first", "middle", "last")
# (component, stage) -> row of the table
_Job = Mapping[tuple[str, str], Mapping[str, str]]


def main(data: Path) -> None:
    """Print the error of every job, both ways links can work, and the mean by cluster."""
    path = data / "gpumodeling" / "truth" / "truth.csv"
    if not path.is_file():
        _say(f"skipped: {path} is not on this machine")
        return
    jobs: dict[tuple[str, str], dict[tuple[str, str], dict[str, str]]] = defaultdict(dict)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            jobs[row["config_id"], row["job_id"]][row["component"], row["stage"]] = row
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    _say(f"{'configuration':26} {'measured s':>10} {'one way':>9} {'both ways':>10}")
    for (config, _), job in jobs.items():
        measured_us = sorted(_time(job, "train_batch", stage) for stage in _STAGES)[1]
        found = [_compose(job, is_duplex) / measured_us - 1 for is_duplex in (False, True)]
        errors[job["train_batch", "first"]["cluster"]].append((found[0], found[1]))
        _say(f"{config:26} {measured_us / 1e6:10.3f} {found[0]:+9.2%} {found[1]:+10.2%}")
    for cluster, pairs in errors.items():
        means = [sum(abs(pair[index]) for pair in pairs) / len(pairs) for index in (0, 1)]
        _say(f"{cluster + ', mean':26} {len(pairs):10} {means[0]:9.2%} {means[1]:10.2%}")


def _compose(job: _Job, has_duplex_links: bool) -> float:
    """Return the step time in µs."""
    facts = job["train_batch", "first"]
    num_stages, num_micro_batches = int(facts["pp"]), int(facts["gas"])
    stages = ["first", *["middle"] * (num_stages - 2), "last"]
    sends = [_time(job, "pp_p2p", stage, "best_min_us") for stage in stages[:-1]]
    times = [
        ChunkTimes(
            forward_us=_time(job, "stage_fwd", stage),
            backward_input_us=_time(job, "stage_bwd", stage),
            send_forward_us=sends[index] if index < num_stages - 1 else 0.0,
            send_backward_us=sends[index - 1] if index > 0 else 0.0,
        )
        for index, stage in enumerate(stages)
    ]
    orders = find_schedule("one_f_one_b").orders(num_stages, num_micro_batches, 1)
    run = run_pipeline(orders, times, LinkRules(has_duplex_links=has_duplex_links))
    # The last stage's reduction contains waiting, and it ends long before the first one's.
    reduced = [
        end + _time(job, "dp_allreduce", stage)
        for end, stage in zip(run.rank_ends_us[:-1], stages[:-1], strict=True)
    ]
    return float(max(reduced)) + _time(job, "optimizer_step", "first")


def _time(job: _Job, component: str, stage: str, column: str = "best_avg_us") -> float:
    return float(job[component, stage][column])


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _DEFAULT_DATA)
