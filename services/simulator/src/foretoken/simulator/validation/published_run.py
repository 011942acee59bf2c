"""Serving runs that others measured and published as one figure each: mean TTFT and TPOT.

A CSV table as the wheel `aisimulate` has it (`silicon_sample.csv`): a run a row, with model,
system, engine and version, formats, lengths, degrees of parallelism, and how many requests ran at a
time. Nothing is fitted to them.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from foretoken.domain.alias import canonical_device, canonical_model
from foretoken.domain.models.architecture import all_models, list_forms

_CONCURRENCY = re.compile(r"_c(\d+)_")
# Runs out of InferenceMAX's database, by the day of its export; the others have fixed lengths.
_OF_INFERENCE_MAX = re.compile(r"(source_file=|db-dump/)\d{4}-\d\d-\d\d")
# Of the longest, the shortest length that its client draws. Source: InferenceMAX,
# utils/bench_serving/benchmark_serving.py and benchmark_lib.sh.
INFERENCE_MAX_SHORTEST_RATIO = 0.8
# Rows of disaggregated deployments say too little of their pools.
_AGGREGATED = "agg"
# Lengths that are farther apart than this factor make another workload, or another step.
_ALIKE_RATIO = 2.5
# What checkpoints in another format add to the name of their model.
_FORMAT_END = re.compile(r"-(FP8|NVFP4)$")


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A measured run; `formats` are those of weights in GEMM and experts, times are means.

    `num_devices` is what one replica takes; `concurrency` requests ran on it at a time. Lengths
    were drawn evenly between `shortest_ratio` of those given and these.
    """

    name: str
    model: str
    device: str
    engine: str
    version: str
    formats: tuple[str, str]
    tp: int
    pp: int
    dp: int
    ep: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    shortest_ratio: float = 1.0

    @property
    def num_devices(self) -> int:
        """GPUs of the replica."""
        return self.tp * self.pp * self.dp

    @cached_property
    def output_tps_per_gpu(self) -> float:
        """Output tokens per second of a GPU, with so many requests at a time in a closed loop."""
        request_ms = self.ttft_ms + (self.output_tokens - 1) * self.tpot_ms
        return 1e3 * self.concurrency * self.output_tokens / request_ms / self.num_devices

    def describe(self) -> str:
        """Return the run in a line."""
        axes = (("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("ep", self.ep))
        layout = " ".join(f"{name}{degree}" for name, degree in axes if degree > 1) or "tp1"
        weights = f" in {self.formats[0]}" if self.formats[0] else ""
        return (
            f"{self.output_tps_per_gpu:,.0f} tokens/s per GPU at batch {self.concurrency},"
            f" TTFT {self.ttft_ms:,.0f} ms, TPOT {self.tpot_ms:.3g} ms:"
            f" {self.engine} {self.version}{weights}, {layout},"
            f" {self.input_tokens:,} prompt and {self.output_tokens:,} answer tokens"
        )


def read_published(content: bytes) -> list[PublishedRun]:
    """Return the aggregated runs of a table, in its order; rows without a figure are left out."""
    rows = csv.DictReader(io.StringIO(content.decode("utf-8")))
    return list(_read_rows(rows))


def _read_rows(rows: Iterable[Mapping[str, str]]) -> Iterator[PublishedRun]:
    for row in rows:
        if row["mode"] != _AGGREGATED or not (row["silicon_ttft_ms"] and row["silicon_tpot_ms"]):
            continue
        layout = _read_layout(row)
        yield PublishedRun(
            name=row["id"],
            model=_name_model(row["model_path"]),
            device=canonical_device(row["system"]),
            engine=row["backend"],
            version=row["backend_version"],
            formats=(row["gemm_quant_mode"], row["moe_quant_mode"]),
            **layout,
            concurrency=_read_concurrency(row, layout["dp"]),
            input_tokens=_read_count(row["isl"]),
            output_tokens=_read_count(row["osl"]),
            ttft_ms=float(row["silicon_ttft_ms"]),
            tpot_ms=float(row["silicon_tpot_ms"]),
            shortest_ratio=(
                INFERENCE_MAX_SHORTEST_RATIO
                if _OF_INFERENCE_MAX.match(row.get("silicon_data_source", ""))
                else 1.0
            ),
        )


def _read_layout(row: Mapping[str, str]) -> dict[str, int]:
    """Return the degrees: experts lie on the tp ranks, and attention replicas share them."""
    ep = _read_count(row["moe_ep_size"])
    tp = max(_read_count(row["tp_size"]) if ep == 1 else ep, _read_count(row["moe_tp_size"]))
    dp = _read_count(row["attention_dp_size"])
    pp = _read_count(row["pp_size"])
    return (
        {"tp": 1, "dp": tp, "pp": pp, "ep": ep}
        if dp > 1
        else {"tp": tp, "dp": 1, "pp": pp, "ep": ep}
    )


def _read_concurrency(row: Mapping[str, str], dp: int) -> int:
    """Return how many requests ran at a time on one replica: a batch for each rank of attention.

    The name has those of all replicas together, of which a run may have had many.
    """
    named = _CONCURRENCY.search(row["id"])
    counts = [int(named[1])] if named else []
    if row["batch_size"]:
        counts.append(_read_count(row["batch_size"]) * dp)
    return min(counts, default=1)


def _read_count(text: str) -> int:
    return max(int(float(text)), 1) if text else 1


def _name_model(path: str) -> str:
    """Return the name of a preset, else the published one."""
    last = path.rpartition("/")[2]
    names = map(canonical_model, (path, last, _FORMAT_END.sub("", last)))
    return next((name for name in names if name in all_models()), path)


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedRun:
    """What a run is compared with: model, device, lengths, and the layout that was found."""

    model: str
    device: str
    input_tokens: float
    output_tokens: float
    tp: int = 1
    concurrency: int = 1
    engine: str = ""


def ratio_log(one: float, other: float) -> float:
    """Return how far numbers are apart, as the logarithm of their ratio; 0: they are equal."""
    return abs(math.log(one / other))


def is_alike(one: float, other: float) -> bool:
    """Whether two lengths are so near that what was measured of one says something of the other."""
    return ratio_log(one, other) <= math.log(_ALIKE_RATIO)


def find_nearest(runs: Sequence[PublishedRun], asked: AskedRun) -> PublishedRun | None:
    """Return the run of the model and device that is most like what is asked; None: none is alike.

    Lengths count first, then the layout, then how many requests run at a time, then the engine and
    the format of the checkpoint.
    """
    forms = list_forms(asked.model)
    alike = [
        run
        for run in runs
        if run.device == asked.device
        and run.model in forms
        and all(is_alike(*pair) for pair in _lengths(run, asked))
    ]
    return min(alike, key=lambda run: _distance(run, asked), default=None)


def _lengths(run: PublishedRun, asked: AskedRun) -> tuple[tuple[float, float], ...]:
    pairs = ((run.input_tokens, asked.input_tokens), (run.output_tokens, asked.output_tokens))
    return tuple((one, max(other, 1.0)) for one, other in pairs)


def _distance(run: PublishedRun, asked: AskedRun) -> tuple[float, float, float, bool, bool]:
    return (
        round(max(ratio_log(*pair) for pair in _lengths(run, asked)), 2),
        ratio_log(run.tp, asked.tp),
        ratio_log(run.concurrency / run.dp, asked.concurrency),
        run.engine != asked.engine,
        run.model != asked.model,
    )
