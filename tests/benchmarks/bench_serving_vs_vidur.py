"""Our scheduler against Vidur's Sarathi scheduler on Vidur's own operator tables.

Both take the same latencies, so that what differs is scheduling and bookkeeping alone. Prints the
errors of every request's end-to-end and prefill time; needs ../shared/data.

With equal prompts all requests agree. On the trace the steps agree until a prompt's last chunk is a
single token: Vidur charges it as a prefill, we as a decode, which is how kernels run one query over
a context. The step differs by a few ms, later arrivals fall on other sides of a step's end, and
single requests wait a step more or less. Vidur reserves blocks for the whole prompt and keeps a
hundredth free; neither matters in these runs, whose cache is never full.
"""

import csv
import gzip
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.units import NS_PER_S
from foretoken.simulator.serving.batch import StepBudget, StepShape
from foretoken.simulator.serving.cluster import Cluster
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.metrics import collect_times
from foretoken.simulator.serving.replica import Replica, ReplicaRules
from foretoken.simulator.serving.request import SimRequest
from foretoken.simulator.serving.routers.round_robin import ROUTER
from foretoken.simulator.serving.schedulers.chunked_prefill import SCHEDULER

_VIDUR = Path(__file__).resolve().parents[3] / "shared" / "data" / "vidur"
_RUNS = ("clean_conv_sarathi_2000", "clean_syn_sarathi_2000")
# Configuration of the runs, from their config.json and timing.json.
_NUM_LAYERS, _CHUNK_TOKENS, _MAX_SEQS, _NUM_BLOCKS, _BLOCK_SIZE = 28, 512, 128, 11008, 16
_MAX_CONTEXT = 4096
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


class VidurTables:
    """Composes Vidur's tables as Vidur does: token counts in eights, contexts in 64s."""

    num_stages = 1

    def __init__(self, folder: Path) -> None:
        tables = {
            path.name.removesuffix(".csv.gz"): _read_columns(path)
            for path in folder.glob("*.csv.gz")
        }
        dense_ms = sum(tables[name][-1] for name in _DENSE)
        eights = (np.arange(len(dense_ms)) // 8 + 1) * 8
        self._dense_us = self._all_layers_us(
            dense_ms[np.minimum(eights, len(dense_ms)) - 1] + tables["attn_kv_cache_save"][-1]
        )
        self._decode_us = _as_table(tables["attn_decode"], self._all_layers_us)
        self._prefill_us = _as_table(tables["attn_prefill"], self._all_layers_us)

    def stage_us(self, shape: StepShape) -> Sequence[float]:
        """Return the time of a step, in µs."""
        total_us = self._dense_us[shape.num_tokens - 1]
        if shape.num_decodes:
            total_us += self._attention_us(shape.num_decodes, shape.decode_kv_tokens)
        if shape.prefills:
            context = sum(_round_up(context) for _, context in shape.prefills)
            chunk = round(sum(tokens**2 for tokens, _ in shape.prefills) ** 0.5)
            total_us += self._prefill_us[context, chunk**2] * _overhead(len(shape.prefills))
        return [total_us]

    def decode_us(self, num_decodes: int, kv_tokens: int, _kv_tokens_max: int) -> float:
        """Return the time of a step that only decodes, in µs."""
        return self._dense_us[num_decodes - 1] + self._attention_us(num_decodes, kv_tokens)

    def _attention_us(self, num_decodes: int, kv_tokens: int) -> float:
        mean = _round_up(kv_tokens // num_decodes)
        return self._decode_us[num_decodes, mean] * _overhead(num_decodes)

    @staticmethod
    def _all_layers_us(layer_ms: NDArray[np.float64]) -> list[float]:
        layers_us: list[float] = (layer_ms * _NUM_LAYERS * 1e3).tolist()
        return layers_us


def main() -> int:
    """Print one block per reference run."""
    if not _VIDUR.is_dir():
        print("skipped: the shared measurements (../shared/data) are not on this machine")
        return 0
    cost = VidurTables(_VIDUR / "reference_tables")
    for name in _RUNS:
        _compare(name, cost)
    return 0


def _compare(name: str, cost: VidurTables) -> None:
    rows = list(_read_metrics(_VIDUR / "reference_runs" / name / "request_metrics.csv.gz"))
    arrivals_s = np.cumsum([float(row["request_inter_arrival_delay"] or 0.0) for row in rows])
    requests = [
        SimRequest(
            index,
            round(arrival_s * NS_PER_S),
            int(float(row["request_num_prefill_tokens"])),
            int(float(row["request_num_decode_tokens"])),
        )
        for index, (arrival_s, row) in enumerate(zip(arrivals_s.tolist(), rows, strict=True))
    ]
    rules = ReplicaRules(SCHEDULER, StepBudget(_CHUNK_TOKENS, _MAX_SEQS), _MAX_CONTEXT)
    replica = Replica(rules, cost, KvCache(_NUM_BLOCKS, _BLOCK_SIZE))
    Cluster([replica], ROUTER(), requests).run(lambda: None)
    times = collect_times(requests, [replica.log.columns().end_ns])
    print(f"{name}: {len(requests)} requests, {replica.log.num_steps} serving steps")
    for label, simulated_ns, column in (
        ("end-to-end", times.e2e_ns, "request_e2e_time"),
        ("prefill", times.ttft_ns, "prefill_e2e_time"),
    ):
        reference_s = np.array([float(row[column]) for row in rows])
        ratio = simulated_ns / NS_PER_S / reference_s - 1
        print(
            f"  {label} time against Vidur: mean error {ratio.mean():+.4%},"
            f" mean absolute {np.abs(ratio).mean():.4%}, worst {np.abs(ratio).max():.3%},"
            f" within 0.01 % {np.mean(np.abs(ratio) < 1e-4):.1%}"
        )


def _read_metrics(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _read_columns(path: Path) -> NDArray[np.float64]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2).T


def _as_table(
    columns: NDArray[np.float64], scale: Callable[[NDArray[np.float64]], list[float]]
) -> dict[tuple[int, int], float]:
    keys = zip(columns[0].astype(int).tolist(), columns[1].astype(int).tolist(), strict=True)
    return dict(zip(keys, scale(columns[2]), strict=True))


def _round_up(tokens: int) -> int:
    return -(-tokens // _KV_STEP) * _KV_STEP


def _overhead(num_seqs: int) -> float:
    return 1 + _BATCHING_OVERHEAD_RATIO * (num_seqs > 1)


if __name__ == "__main__":
    sys.exit(main())
