"""Compare the closed form with measured disaggregated runs that AIConfigurator publishes.

DeepSeek-V3 on H200, prefill and decode replicas apart, at a fixed concurrency: mean TTFT and TPOT.
Operator times come from AIConfigurator's own H200 tables, imported and learned; lengths are 0.8 to
1 of the nominal ones, as InferenceMAX sends them. Prints errors and rank correlations, and why rows
were not answered. AIConfigurator's own errors on these rows are not published with them: none are
printed next to them. The closed form's TTFT is that of a steady load when the prompt is computed.
The measured one has more in it, which nothing here says: servers and a router before the pools,
what passes between them before a client has its first token, and the first requests coming all at
once.

    python tests/benchmarks/bench_search_disaggregated.py [path of the shared measurements]
        [--home FOLDER] [--rows]
"""

import argparse
import csv
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from closed_loop_tables import ROUTING, TRAINED_ON, train

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.domain.units import US_PER_S
from foretoken.simulator.search.serving.engine_answer import AnswerCache, EngineAnswer
from foretoken.simulator.search.serving.load import LoadProfile, profile_load
from foretoken.simulator.search.serving.space import EngineKind, SearchSpace

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_PROFILES = {
    "trtllm": ("trtllm-1.0", "trtllm 1.3.0rc20"),
    "sglang": ("sglang-0.5", "vllm 0.24.0"),
}
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_STEP_LIMIT = 16384
_SHORTEST_RATIO = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A measured run: its pools, load and latencies in ms."""

    name: str
    backend: str
    prefill: ParallelLayout
    decode: ParallelLayout
    num_prefill: int
    num_decode: int
    concurrency: int
    prompt: int
    answer: int
    ttft_ms: float
    tpot_ms: float


def main() -> int:
    """Learn the tables where they are not, answer, and print."""
    options = _parse_options()
    path = options.data / "aiconfigurator" / "measured_serving.csv"
    if not path.is_file():
        print("the shared measurements (../shared/data) are not here: nothing to compare with")
        return 0
    runs, reasons = _read_runs(path)
    with tempfile.TemporaryDirectory() as scratch:
        home = options.home or Path(scratch) / "home"
        is_trained = home.exists()
        with Composition(AppConfig(home=str(home))) as services:
            foretoken = services.foretoken("predictor", "simulator")
            if not is_trained:
                train(services, foretoken, options.data, Path(scratch) / "thinned")
            cache = AnswerCache(services.predictor, 1000)
            found = []
            for run in runs:
                try:
                    found.append((run, *_answer(run, cache)))
                except ForetokenError as err:
                    reasons[str(err)[:100]] += 1
    if options.rows:
        _print_rows(found)
    _print_errors(found)
    for reason, count in reasons.most_common():
        print(f"not answered: {count} rows, {reason}")
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=_DATA, help="shared measurements")
    parser.add_argument("--home", type=Path, help="keep the trained predictor here, or use it")
    parser.add_argument("--rows", action="store_true", help="print every row")
    return parser.parse_args()


def _read_runs(path: Path) -> tuple[list[_Run], Counter[str]]:
    runs: list[_Run] = []
    reasons: Counter[str] = Counter()
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["mode"] != "disagg":
                continue
            if row["system"] != TRAINED_ON:
                reasons[f"{row['system']}: the tables are of {TRAINED_ON}"] += 1
            else:
                runs.append(_read_run(row))
    return runs, reasons


def _read_run(row: Mapping[str, str]) -> _Run:
    concurrency = re.search(r"_c(\d+)_", row["id"])
    return _Run(
        name=row["id"],
        backend=row["backend"],
        prefill=_read_layout(row, "prefill"),
        decode=_read_layout(row, "decode"),
        num_prefill=_number(row["prefill_num_workers"]),
        num_decode=_number(row["decode_num_workers"]),
        concurrency=int(concurrency[1]) if concurrency else _number(row["decode_batch_size"]),
        prompt=_number(row["isl"]),
        answer=_number(row["osl"]),
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
    )


def _read_layout(row: Mapping[str, str], pool: str) -> ParallelLayout:
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, dp, moe_tp, ep = (_number(row[f"{pool}_{name}"]) for name in names)
    devices = max(tp * dp, moe_tp * ep)
    if dp > 1:
        return ParallelLayout(tp=devices // dp, dp=dp, ep=devices)
    return ParallelLayout(tp=devices, ep=ep)


def _number(text: str) -> int:
    return max(1, int(float(text))) if text else 1


def _answer(run: _Run, cache: AnswerCache) -> tuple[float, float]:
    """Return mean TTFT and TPOT in ms of the closed loop."""
    profile, framework = _PROFILES[run.backend]
    scenario = ServingScenario(
        model=find_model("deepseek-v3"),
        device=TRAINED_ON,
        framework=framework,
        quantization="fp8_block",
        kv_dtype=DType.FP8 if run.backend == "trtllm" else None,
        moe_routing=ROUTING,
        engine=EngineSpec(profile=profile),
        workload=WorkloadSpec(
            num_requests=1000, prefill=_lengths(run.prompt), decode=_lengths(run.answer)
        ),
    )
    load = profile_load(scenario)
    kinds = [
        EngineKind(device=TRAINED_ON, profile=profile, quantization="fp8_block", layout=layout)
        for layout in (run.prefill, run.decode)
    ]
    space = SearchSpace(
        kinds=tuple(dict.fromkeys(kinds)),
        modes=("disaggregated",),
        batches=_BATCHES,
        prefill_batches=(1, 64),
        step_limits=(_STEP_LIMIT,),
        routers=("least_outstanding",),
        max_devices=64,
        num_same_kinds=0,
    )
    found = {answer.kind: answer for answer in cache.answer(scenario, space, load).engines}
    for kind, role in zip(kinds, ("prefill", "decode"), strict=True):
        if not getattr(found[kind], role).state.rate_rps.any():
            reason = getattr(found[kind], role).reason[0]
            raise InvalidRequestError.of_field(role, f"{run.backend} {role}: {reason}")
    return _solve(run, found[kinds[0]], found[kinds[1]], load)


def _solve(
    run: _Run, prefill: EngineAnswer, decode: EngineAnswer, load: LoadProfile
) -> tuple[float, float]:
    """Find the rate at which all requests there are are under way: Little's law."""
    answer = load.decode_mean - 1
    service_us = float(prefill.prefill.state.ttft_us[0, 0])
    most = run.num_prefill * float(prefill.prefill.state.rate_rps[0].max()) / US_PER_S
    curve = decode.decode.state

    def latencies(rate: float) -> tuple[float, float]:
        each = rate / run.num_decode * US_PER_S
        tpot_us = float(np.interp(each, curve.rate_rps[0], curve.tpot_us[0]))
        busy = rate / most
        waiting = load.prefill_second_ratio / 2 * busy / max(1 - busy, 1e-9)
        return service_us * (1 + waiting / run.num_prefill), tpot_us

    low, high = 0.0, min(most, run.num_decode * float(curve.rate_rps[0].max()) / US_PER_S)
    for _ in range(80):
        middle = (low + high) / 2
        ttft_us, tpot_us = latencies(middle)
        if middle * (ttft_us + answer * tpot_us) < run.concurrency:
            low = middle
        else:
            high = middle
    ttft_us, tpot_us = latencies(low)
    # What is under way beyond that waits for its prompt.
    ttft_us = max(ttft_us, run.concurrency / low - answer * tpot_us) if low else ttft_us
    return ttft_us / 1000, tpot_us / 1000


def _lengths(most: int) -> LengthSpec:
    return LengthSpec(kind="uniform", minimum=round(_SHORTEST_RATIO * most), maximum=most)


def _print_rows(found: Sequence[tuple[_Run, float, float]]) -> None:
    for run, ttft_ms, tpot_ms in found:
        print(
            f"{run.name}: TTFT {ttft_ms:,.0f} ms (measured {run.ttft_ms:,.0f}),"
            f" TPOT {tpot_ms:.1f} ms (measured {run.tpot_ms:.1f})"
        )


def _print_errors(found: Sequence[tuple[_Run, float, float]]) -> None:
    for name, place in (("TTFT", 1), ("TPOT", 2)):
        ours = np.array([row[place] for row in found], dtype=np.float64)
        measured = np.array([getattr(row[0], f"{name.lower()}_ms") for row in found])
        errors = np.abs(ours / measured - 1)
        ranks = [np.argsort(np.argsort(values)).astype(float) for values in (ours, measured)]
        correlation = np.corrcoef(ranks[0], ranks[1])[0, 1]
        print(
            f"{name}: {len(found)} rows, error mean {errors.mean():.1%} median"
            f" {np.median(errors):.1%}, rank correlation {correlation:.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
