"""Our schedulers against Vidur's, on Vidur's own operator tables: scheduling and nothing else.

Prints TTFT, TPOT and end-to-end latency of each reference run next to Vidur's; needs
../shared/data. What differs by definition:

- A prompt's last piece of a single token. Vidur charges it as a prefill, we as a decode, which is
  how kernels run one query over a context. The last columns say what that does.
- Vidur's vLLM counts a batch of prompts against the token limit as if all were as long as the
  longest, as vLLM did before 0.2.6; the runs here set `counts_padding` for it.
- The time between tokens in Vidur's documentation is the time of batches, which lacks the steps
  that a request sits out. The gap between a user's tokens, weighted by tokens, is printed next to
  it and to what Vidur has per token (decode_token_execution_plus_preemption_time).
- Tokens of a restarted request count from its restart in Vidur, from the first token the user saw
  here. No request of these runs restarts.
"""

import csv
import gzip
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.frameworks.engine import EngineProfile, find_engine
from foretoken.domain.units import NS_PER_S, NS_PER_US
from foretoken.simulator.cluster.setup import PoolSetup
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.engine import clock, hand_over
from foretoken.simulator.engine.layout import NEVER_NS, Records
from foretoken.simulator.engine.output import (
    Slice,
    join_slices,
    step_records,
    take_output,
    token_runs,
)
from foretoken.simulator.engine.state import EngineState, build_pool_state
from foretoken.simulator.serving.record import StepRecord, TokenRuns
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import plan_requests

_VIDUR = Path(__file__).resolve().parents[3] / "shared" / "data" / "vidur"
# Configuration of the runs, from their config.json and timing.json.
_NUM_LAYERS, _NUM_BLOCKS = 28, 11008
_PROFILES: Mapping[str, EngineProfile] = {
    "sarathi": find_engine("sarathi"),
    "vllm": replace(
        find_engine("vllm-v0"),
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        counts_padding=True,
    ),
}
_DENSE = (
    "attn_pre_proj",
    "attn_post_proj",
    "attn_rope",
    "mlp_up_proj",
    "mlp_down_proj",
    "mlp_act",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
)
_BATCHING_OVERHEAD_RATIO = 0.1
_KV_STEP = 64
# Of what an engine wrote down, before it is taken away.
_MANY = 10_000
_LATENCIES = ("TTFT", "TPOT", "e2e")
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")

Floats = NDArray[np.float64]
Latencies = Mapping[str, Floats]


class VidurCost:
    """Composes Vidur's tables as Vidur does: token counts in eights, contexts in 64s.

    With `is_strict` a prompt's last piece of a single token is a prefill, as in Vidur.
    """

    def __init__(self, folder: Path, *, is_strict: bool) -> None:
        tables = {
            path.name.removesuffix(".csv.gz"): _read_columns(path)
            for path in folder.glob("*.csv.gz")
        }
        dense_ms = sum(tables[name][-1] for name in _DENSE)
        eights = (np.arange(len(dense_ms)) // 8 + 1) * 8
        self._dense_us = _all_layers_us(
            dense_ms[np.minimum(eights, len(dense_ms)) - 1] + tables["attn_kv_cache_save"][-1]
        )
        self._decode_us = _as_table(tables["attn_decode"], _all_layers_us)
        self._prefill_us = _as_table(tables["attn_prefill"], _all_layers_us)
        self._is_strict = is_strict

    def step_us(self, batch: "_Batch") -> float:
        """Return the time of a step, in µs."""
        count, kv_tokens = batch.num_decodes, batch.decode_kv_tokens
        prefills = list(batch.prefills)
        if self._is_strict:
            prefills += [(1, context) for context in batch.last_pieces]
            count -= len(batch.last_pieces)
            kv_tokens -= sum(batch.last_pieces) + len(batch.last_pieces)
        total_us = self._dense_us[batch.num_tokens - 1]
        if count:
            mean = _round_up(kv_tokens // count)
            total_us += self._decode_us[count, mean] * _overhead(count)
        if prefills:
            context = sum(_round_up(context) for _, context in prefills)
            chunk = round(sum(tokens**2 for tokens, _ in prefills) ** 0.5)
            total_us += self._prefill_us[context, chunk**2] * _overhead(len(prefills))
        return total_us


class _Batch(NamedTuple):
    """A step: pieces of prompts as (tokens, context), and contexts before last pieces of one."""

    num_tokens: int
    num_decodes: int
    decode_kv_tokens: int
    prefills: Sequence[tuple[int, int]]
    last_pieces: Sequence[int]


class _Record(NamedTuple):
    """What an engine did: a row of times for each request, its steps and the tokens of answers."""

    requests: Records
    steps: StepRecord
    tokens: TokenRuns


def main() -> int:
    """Print one table per reference run."""
    if not _VIDUR.is_dir():
        print("skipped: the shared measurements (../shared/data) are not on this machine")
        return 0
    strict, ours = (
        VidurCost(_VIDUR / "reference_tables", is_strict=is_strict) for is_strict in (True, False)
    )
    worst = 0.0
    for folder in sorted((_VIDUR / "reference_runs").glob("clean_*")):
        worst = max(worst, _compare(folder, strict, ours))
    print(f"\nworst error of all, charged as Vidur charges: {worst:.4%} (wanted: at most 0.5 %)")
    return 0


def _compare(folder: Path, strict: VidurCost, ours: VidurCost) -> float:
    """Print a run; return its worst error."""
    rows = list(_read_rows(folder / "request_metrics.csv.gz"))
    record = _simulate(folder.name, rows, strict)
    measured, found = _latencies_of(rows), _latencies(record)
    found_ours = _latencies(_simulate(folder.name, rows, ours))
    num_steps = len(record.steps.end_ns)
    print(f"\n{folder.name}: {len(rows)} requests, {num_steps} steps")
    print("              Vidur ms   ours ms    error  a token as a decode")
    worst = 0.0
    for name in _LATENCIES:
        for label, wanted, got, other in zip(
            _STATISTICS,
            *map(_statistics, (measured[name], found[name], found_ours[name])),
            strict=True,
        ):
            error = got / wanted - 1
            worst = max(worst, abs(error))
            print(
                f"  {name:4} {label:4} {wanted * 1e3:11.3f} {got * 1e3:9.3f} {error:+8.4%}"
                f" {other * 1e3:10.3f} {other / wanted - 1:+8.4%}"
            )
    each = np.abs(found["e2e"] / measured["e2e"] - 1).max()
    print(f"  any request's e2e is at most {each:.2e} off")
    _compare_gaps(folder, record)
    return worst


def _compare_gaps(folder: Path, record: _Record) -> None:
    """Print the gaps between tokens next to what Vidur gives for them, where it does."""
    path = folder / "decode_token_execution_plus_preemption_time.csv"
    if not path.is_file():
        return
    with path.open(newline="", encoding="utf-8") as file:
        quantiles = [
            float(row["decode_token_execution_plus_preemption_time"])
            for row in csv.DictReader(file)
        ]
    steps, runs = record.steps, record.tokens
    times_s = [
        steps.end_ns[first + stride * np.arange(count)] / NS_PER_S
        for first, stride, count in zip(runs.first_step, runs.stride, runs.count, strict=True)
    ]
    last = np.append(runs.request[1:] != runs.request[:-1], True)
    ends = np.cumsum(runs.count)[last]
    gaps = np.concatenate([np.diff(part) for part in np.split(np.concatenate(times_s), ends[:-1])])
    batches = (steps.end_ns - steps.start_ns) / NS_PER_S
    for percent in (50, 90, 99):
        batch_ms, gap_ms = (np.percentile(times, percent) * 1e3 for times in (batches, gaps))
        print(
            f"  p{percent} of batches {batch_ms:.3f} ms, of gaps between tokens {gap_ms:.3f} ms;"
            f" Vidur's time between tokens {quantiles[percent] * 1e3:.3f} ms"
        )


def _simulate(name: str, rows: Sequence[Mapping[str, str]], cost: VidurCost) -> _Record:
    """Let an engine choose its batches one by one; how long each takes is said from outside."""
    profile = next(profile for key, profile in _PROFILES.items() if key in name)
    delays_s = [float(row["request_inter_arrival_delay"] or 0.0) for row in rows]
    plan = plan_requests(
        np.rint(np.cumsum(delays_s) * NS_PER_S).astype(np.int64),
        *(
            _column(rows, f"request_num_{kind}_tokens").astype(np.int64)
            for kind in ("prefill", "decode")
        ),
    )
    setup = DeploymentSetup(profile=profile, num_kv_blocks=_NUM_BLOCKS)
    state = build_pool_state(plan, PoolSetup(name="", engines=setup), flat_tables())
    rules, arrays = state.record[0], state.arrays
    slices: list[Slice] = []
    arrivals = deque(enumerate(plan.arrival_ns.tolist()))
    while arrivals or rules["next_ns"] < NEVER_NS:
        now_ns = min(int(rules["next_ns"]), arrivals[0][1] if arrivals else NEVER_NS)
        clock.complete_at(state.record, now_ns)
        while arrivals and arrivals[0][1] == now_ns:
            hand_over.submit(state.record, 0, arrivals.popleft()[0], now_ns)
        num_steps = int(arrays["engines"]["num_steps"][0])
        if rules["next_ns"] == now_ns:
            clock.tick_at(state.record, now_ns)
        if arrays["engines"]["num_steps"][0] > num_steps:
            end_ns = now_ns + round(cost.step_us(_batch_of(state)) * NS_PER_US)
            arrays["flights"]["end_ns"][0, 0] = arrays["stage_free"][0, 0] = end_ns
        if max(rules["num_out_steps"], rules["num_out_prefills"]) > _MANY:
            slices.append(take_output(state))
    output = join_slices([*slices, take_output(state)])
    (steps,) = step_records(output, setup)
    return _Record(arrays["requests"], steps, token_runs(output.runs))


def _batch_of(state: EngineState) -> _Batch:
    """Return the batch that was chosen last."""
    arrays, requests = state.arrays, state.arrays["requests"]
    flight, end = arrays["flights"][0, 0], int(state.record["num_out_prefills"][0])
    begun = slice(end - int(flight["num_prefills"]), end)
    tokens, context = (arrays[f"prefill_{name}"][begun].tolist() for name in ("tokens", "context"))
    rows = arrays["rows"][0, 0, : flight["num_yielding"]]
    is_last = (requests["num_generated"][rows] == 1) & ~np.isin(
        rows, arrays["prefills"]["request"][begun]
    )
    return _Batch(
        num_tokens=int(flight["num_tokens"]),
        num_decodes=int(flight["num_decodes"]),
        decode_kv_tokens=int(flight["decode_kv_tokens"]),
        prefills=list(zip(tokens, context, strict=True)),
        last_pieces=(requests["num_prefill"][rows[is_last]] - 1).tolist(),
    )


def _latencies(record: _Record) -> Latencies:
    requests = record.requests
    ttft, e2e = (
        (requests[name] - requests["earliest_ns"]) / NS_PER_S
        for name in ("first_token_ns", "finished_ns")
    )
    return {"TTFT": ttft, "TPOT": _tpot(ttft, e2e, requests["num_decode"]), "e2e": e2e}


def _latencies_of(rows: Sequence[Mapping[str, str]]) -> Latencies:
    ttft, e2e = _column(rows, "prefill_e2e_time"), _column(rows, "request_e2e_time")
    return {
        "TTFT": ttft,
        "TPOT": _tpot(ttft, e2e, _column(rows, "request_num_decode_tokens")),
        "e2e": e2e,
    }


def _tpot(ttft: Floats, e2e: Floats, num_tokens: NDArray[np.number]) -> Floats:
    several = num_tokens > 1
    return np.asarray((e2e - ttft)[several] / (num_tokens[several] - 1))


def _statistics(values: Floats) -> list[float]:
    return [float(values.mean()), *np.percentile(values, [50, 90, 95, 99]).tolist()]


def _column(rows: Sequence[Mapping[str, str]], name: str) -> Floats:
    return np.array([float(row[name]) for row in rows])


def _read_rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _read_columns(path: Path) -> Floats:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2).T


def _all_layers_us(layer_ms: Floats) -> list[float]:
    layers_us: list[float] = (layer_ms * _NUM_LAYERS * 1e3).tolist()
    return layers_us


def _as_table(
    columns: Floats, scale: Callable[[Floats], list[float]]
) -> dict[tuple[int, int], float]:
    keys = zip(columns[0].astype(int).tolist(), columns[1].astype(int).tolist(), strict=True)
    return dict(zip(keys, scale(columns[2]), strict=True))


def _round_up(tokens: int) -> int:
    return -(-tokens // _KV_STEP) * _KV_STEP


def _overhead(num_seqs: int) -> float:
    return 1 + _BATCHING_OVERHEAD_RATIO * (num_seqs > 1)


if __name__ == "__main__":
    sys.exit(main())
