"""How far the closed form's TTFT is from simulations, over models, lengths, engines and layouts.

Every search is without limits; of its candidates some are simulated, evenly through the order of
their TTFT. Operator times are rooflines from data sheets, so that nothing else is needed: what the
closed form leaves out are queues and bursts, whatever the operators take. Prints a row for each,
then the quantiles of the closed form over the simulation, for each mode and where lengths vary.
`services/simulator/.../search/serving/target.py` takes its margin from them.

    python tests/benchmarks/bench_search_ttft.py [--each N]
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

import numpy as np

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest, ServingSpace
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.finalists import CandidateRuns
from foretoken.simulator.search.serving.search import ServingSearch, make_candidates
from foretoken.simulator.search.serving.table import name_of

_MODELS = ("llama-3.1-8b", "llama-3.1-70b")
_LENGTHS = ((4000, 1000), (512, 128))
_SPREADS = (0.0, 0.6)
_ENGINES = ("vllm-0.20", "sglang-0.5")
_QUANTILES = (5, 25, 50, 75, 90, 95, 100)


def main() -> int:
    """Simulate, and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--each", type=int, default=3, help="simulations of each search and mode")
    options = parser.parse_args()
    ratios: dict[str, list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as home,
        Composition(AppConfig(home=home)) as services,
    ):
        search = ServingSearch(services.predictor)
        runs = CandidateRuns(services.predictor)
        for request in _requests():
            for words, ratio in _compare(request, (search, runs), options.each):
                ratios["all"].append(ratio)
                for word in words:
                    ratios[word].append(ratio)
    for name, found in ratios.items():
        errors = np.abs(np.array(found) - 1)
        quantiles = ", ".join(f"P{each} {np.percentile(found, each):.2f}" for each in _QUANTILES)
        print(f"{name}: {len(found)} simulations, mean error {errors.mean():.0%}; {quantiles}")
    return 0


def _requests() -> Iterator[ServingSearchRequest]:
    for model, (prompt, answer), spread, engine in product(_MODELS, _LENGTHS, _SPREADS, _ENGINES):
        kind = "lognormal" if spread else "fixed"
        for mode in ("aggregated", "disaggregated"):
            yield ServingSearchRequest(
                scenario=ServingScenario(
                    model=find_model(model),
                    device="h200_sxm",
                    engine=EngineSpec(profile=engine),
                    workload=WorkloadSpec(
                        prefill=LengthSpec(kind=kind, mean=prompt, spread=spread),
                        decode=LengthSpec(kind=kind, mean=answer, spread=spread),
                    ),
                ),
                space=ServingSpace(max_devices=4, modes=(mode,), max_num_seqs=(16, 64, 128)),
                num_finalists=0,
            )


def _compare(
    request: ServingSearchRequest, tools: tuple[ServingSearch, CandidateRuns], each: int
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield what a simulation is of, and its closed form's TTFT over the simulated one."""
    search, runs = tools
    form, context = search.answer(request), InlineContext()
    maker = make_candidates(form)
    points = maker.points
    usable = np.flatnonzero(points.is_ok)
    order = usable[np.argsort(points.ttft_us[0, usable])]
    places = np.unique(np.linspace(0, len(order) - 1, each + 2)[1:-1].round().astype(int))
    names = {
        int(row): name_of(points, int(row), form.answers.engines, form.space)
        for row in order[places]
    }
    lengths = "even lengths" if form.load.is_even else "varied lengths"
    for row, (outcome,) in runs.run(maker, names, (1.0,), context):
        simulated_ms = outcome.report.steady.ttft_ms.mean
        told_ms = float(points.ttft_us[0, row]) / 1000
        print(
            f"{request.scenario.model.name} {request.scenario.engine.profile} {lengths}"
            f" {names[row]}: closed form {told_ms:,.0f} ms, simulated {simulated_ms:,.0f},"
            f" {told_ms / simulated_ms:.2f}",
            flush=True,
        )
        yield (request.space.modes[0], lengths), told_ms / simulated_ms


if __name__ == "__main__":
    sys.exit(main())
