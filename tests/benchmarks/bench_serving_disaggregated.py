"""Compare simulated clusters with measured disaggregated runs that AIConfigurator publishes.

Prefill and decode replicas apart under TensorRT-LLM: mean TTFT and TPOT of a closed loop whose
first requests come all at once. Operator times are those of the home that is given, which
`foretoken catalog install nvidia` may have filled, else the starter's; series are learned when they
are asked for. How pools and client were started is what the recipes of these runs say
(`launches/published.yaml`). Where few requests run, an answer hangs on which of them meet: such
runs are simulated with several draws of lengths, the first the client's own, and compared by the
mean. Prints the errors, and why rows were not run.

    python tests/benchmarks/bench_serving_disaggregated.py [path of the shared measurements]
        [--home FOLDER] [--rows] [--only PATTERN]
"""

import argparse
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from warmed_means import mean_latencies_ms

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.app.starter import with_starter
from foretoken.client.facade import Foretoken
from foretoken.domain.errors import ForetokenError
from foretoken.simulator.grid import Floats
from foretoken.simulator.validation.published_launch import NUM_ROUNDS
from foretoken.simulator.validation.published_pools import (
    CLIENT_SEED,
    NUM_WARMUP_ROUNDS,
    RESUME_S,
    PooledRun,
    read_pooled,
    scenario_of_pooled,
)

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
# All draws of a run have so many requests that count, but it has one draw at least.
_REQUESTS_OF_DRAWS, _MOST_DRAWS = 3000, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """TTFT and TPOT in ms of a run by draw, [draw]."""

    run: PooledRun
    ttft_ms: Floats
    tpot_ms: Floats


def main() -> int:
    """Read, simulate and print."""
    options = _parse_options()
    path = options.data / "aiconfigurator" / "measured_serving.csv"
    if not path.is_file():
        print("the shared measurements (../shared/data) are not here: nothing to compare with")
        return 0
    runs = [run for run in read_pooled(path.read_bytes()) if re.search(options.only, run.name)]
    with tempfile.TemporaryDirectory() as scratch:
        home = options.home or Path(scratch) / "home"
        with Composition(with_starter(AppConfig(home=str(home)), {})) as services:
            found, reasons = _simulate_all(runs, services.foretoken("predictor", "simulator"))
    if options.rows:
        _print_rows(found)
    _print_errors(found)
    for reason, count in reasons.most_common():
        print(f"not run: {count} rows, {reason}")
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=_DATA, help="shared measurements")
    parser.add_argument("--home", type=Path, help="a home with measurements")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--only", default="", help="rows whose names have this pattern")
    return parser.parse_args()


def _simulate_all(
    runs: Sequence[PooledRun], foretoken: Foretoken
) -> tuple[list[_Outcome], Counter[str]]:
    """Return what was simulated, and of the others how many have a reason why not.

    Rows that measured one deployment again share its simulations.
    """
    known: dict[PooledRun, tuple[Floats, Floats] | str] = {}
    found: list[_Outcome] = []
    reasons: Counter[str] = Counter()
    for run in runs:
        alike = replace(run, name="", ttft_ms=0.0, tpot_ms=0.0)
        if alike not in known:
            known[alike] = _simulate(run, foretoken)
        answer = known[alike]
        if isinstance(answer, str):
            reasons[answer] += 1
        else:
            found.append(_Outcome(run=run, ttft_ms=answer[0], tpot_ms=answer[1]))
    return found, reasons


def _simulate(run: PooledRun, foretoken: Foretoken) -> tuple[Floats, Floats] | str:
    """Return TTFT and TPOT in ms by draw, or why there are none."""
    wanted = _REQUESTS_OF_DRAWS // (NUM_ROUNDS * run.concurrency)
    num_draws = min(max(wanted, 1), _MOST_DRAWS)
    try:
        draws = [_simulate_draw(run, CLIENT_SEED + draw, foretoken) for draw in range(num_draws)]
    except ForetokenError as err:
        return str(err)[:100]
    ttft_ms, tpot_ms = np.array(draws).T
    return ttft_ms, tpot_ms


def _simulate_draw(run: PooledRun, seed: int, foretoken: Foretoken) -> tuple[float, float]:
    """Return mean TTFT and TPOT in ms of the requests after those that warm up."""
    report = foretoken.simulate_serving(scenario_of_pooled(run, seed))
    if not report.feasibility.is_feasible:
        raise ForetokenError(report.feasibility.reason)
    requests, num_warmup = report.requests, NUM_WARMUP_ROUNDS * run.concurrency
    arrivals_s = np.asarray(requests.arrival_s)[num_warmup:]
    if arrivals_s.min() < RESUME_S or len(np.unique(arrivals_s[: run.concurrency])) > 1:
        raise ForetokenError("the requests that warm up last beyond the start of the others")
    return mean_latencies_ms(requests, num_warmup)


def _print_rows(found: Sequence[_Outcome]) -> None:
    for outcome in found:
        run, ttft_ms = outcome.run, outcome.ttft_ms
        spread = f" {ttft_ms.min():,.0f} to {ttft_ms.max():,.0f}" if len(ttft_ms) > 1 else ""
        print(
            f"{run.name}: TTFT {ttft_ms.mean():,.0f} ms{spread} (measured {run.ttft_ms:,.0f}),"
            f" TPOT {outcome.tpot_ms.mean():.1f} ms (measured {run.tpot_ms:.1f})"
        )


def _print_errors(found: Sequence[_Outcome]) -> None:
    for name, rows in _groups(found).items():
        for metric in ("ttft_ms", "tpot_ms"):
            ours = np.array([getattr(row, metric).mean() for row in rows])
            measured = np.array([getattr(row.run, metric) for row in rows])
            errors = ours / measured - 1
            ranks = [np.argsort(np.argsort(values)).astype(float) for values in (ours, measured)]
            print(
                f"{name}, {metric[:4].upper()}: {len(rows)} rows,"
                f" error mean {np.abs(errors).mean():.1%}"
                f" median {np.median(np.abs(errors)):.1%} bias {errors.mean():+.1%}"
                + (
                    f", rank correlation {np.corrcoef(ranks[0], ranks[1])[0, 1]:.2f}"
                    if len(rows) > 2
                    else ""
                )
            )


def _groups(found: Sequence[_Outcome]) -> Mapping[str, Sequence[_Outcome]]:
    """Return the outcomes of each model and device, by length of the longest prompt and all."""
    groups: dict[str, list[_Outcome]] = defaultdict(list)
    for outcome in sorted(found, key=lambda it: (it.run.device, it.run.model)):
        deployed = f"{outcome.run.model} on {outcome.run.device}"
        groups[f"{deployed}, prompts of up to {outcome.run.input_tokens:,} tokens"].append(outcome)
        groups[f"{deployed}, all"].append(outcome)
    return groups


if __name__ == "__main__":
    sys.exit(main())
