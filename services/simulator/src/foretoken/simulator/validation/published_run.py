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
# Runs out of InferenceMAX's database, by the day of its export, and tables that have such rows over
# again (rounded); the others have fixed lengths.
_OF_INFERENCE_MAX = re.compile(
    r"(source_file=|db-dump/)(\d{4}-\d\d-\d\d|[\w.]+(-[\w.]+)*-gap-analysis\.csv)"
)
# Of the longest, the shortest length that its client draws. Source: InferenceMAX,
# utils/bench_serving/benchmark_serving.py and benchmark_lib.sh.
INFERENCE_MAX_SHORTEST_RATIO = 0.8
# The export of that database that has no runs with drafted tokens; and which of its models ran both
# ways, under which engine on which device. Source: benchmarks/ there, dsr1_fp8_h200_trt_mtp.sh,
# dsr1_{fp4,fp8}_b200_trt_mtp.sh, single_node/{dsr1,qwen3.5}_fp8_b200_mtp.sh.
_WITHOUT_DRAFTS = "db-dump/"
_DRAFTED = {
    ("deepseek-v3", "trtllm", "b200"),
    ("deepseek-v3", "trtllm", "h200_sxm"),
    ("deepseek-v3", "sglang", "b200"),
    ("qwen3.5-397b-a17b", "sglang", "b200"),
}
# Rows of disaggregated deployments say too little of their pools.
_AGGREGATED = "agg"
# Lengths that are farther apart than this factor make another workload, or another step.
_ALIKE_RATIO = 2.5
# When a run was measured, where its export says.
_MEASURED = re.compile(r"\bmeasured=(\d{4}-\d\d-\d\d)")
# What checkpoints in another format add to the name of their model.
_FORMAT_END = re.compile(r"-(FP8|NVFP4)$")


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A measured run; `formats` are those of weights in GEMM and experts, times are means.

    `num_devices` is what one replica takes; `concurrency` requests ran on it at a time. It ran on
    a `day` (`2025-10-29`; empty: nobody says when). With
    `is_of_inference_max` its scripts started server and client, else the lengths were fixed.
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
    is_of_inference_max: bool = False
    day: str = ""

    @property
    def shortest_ratio(self) -> float:
        """Of the lengths given, the least that were drawn, evenly."""
        return INFERENCE_MAX_SHORTEST_RATIO if self.is_of_inference_max else 1.0

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
    """Return the aggregated runs of a table, in its order, each once.

    Left out are rows without a figure, and of exports that do not say whether tokens were drafted
    those that may have been. A figure tells which run it is: exports have runs of others again.
    """
    rows = [
        row
        for row in csv.DictReader(io.StringIO(content.decode("utf-8")))
        if row["mode"] == _AGGREGATED and row["silicon_ttft_ms"] and row["silicon_tpot_ms"]
    ]
    plain = {_figures_of(row) for row in rows if _source_of(row).startswith(_WITHOUT_DRAFTS)}
    kept: dict[tuple[object, ...], PublishedRun] = {}
    for row, run in zip(rows, _read_rows(rows), strict=True):
        if not _may_draft(row, run) or _figures_of(row) in plain:
            kept.setdefault((run.model, run.device, run.engine, *_figures_of(row)), run)
    return list(kept.values())


def _figures_of(row: Mapping[str, str]) -> tuple[str, str, float, float]:
    """Return what a run is known by; tables differ in how many digits they have."""
    ttft_ms, tpot_ms = float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"])
    return row["isl"], row["osl"], round(ttft_ms, 2), round(tpot_ms, 2)


def _source_of(row: Mapping[str, str]) -> str:
    return row.get("silicon_data_source") or ""


def _is_of_inference_max(row: Mapping[str, str]) -> bool:
    return _OF_INFERENCE_MAX.match(_source_of(row)) is not None


def _may_draft(row: Mapping[str, str], run: PublishedRun) -> bool:
    """Whether a run's settings were run with drafted tokens, too, and the row does not say so."""
    return (
        run.is_of_inference_max
        and (run.model, run.engine, run.device) in _DRAFTED
        and not _source_of(row).startswith(_WITHOUT_DRAFTS)
    )


def _read_rows(rows: Iterable[Mapping[str, str]]) -> Iterator[PublishedRun]:
    for row in rows:
        layout = _read_layout(row)
        yield PublishedRun(
            name=row["id"],
            model=_name_model(row["model_path"]),
            device=canonical_device(row["system"]),
            engine=row["backend"],
            version=row["backend_version"],
            formats=(row["gemm_quant_mode"], row["moe_quant_mode"]),
            **layout,
            concurrency=_read_concurrency(row),
            input_tokens=_read_count(row["isl"]),
            output_tokens=_read_count(row["osl"]),
            ttft_ms=float(row["silicon_ttft_ms"]),
            tpot_ms=float(row["silicon_tpot_ms"]),
            is_of_inference_max=_is_of_inference_max(row),
            day=_read_day(row),
        )


def _read_day(row: Mapping[str, str]) -> str:
    found = _MEASURED.search(_source_of(row))
    return found[1] if found else ""


def _read_layout(row: Mapping[str, str]) -> dict[str, int]:
    """Return the degrees: experts lie on the tp ranks, and attention replicas share them.

    Of vLLM's runs some rows have the ranks that hold experts once more as replicas of attention,
    which no script starts: sixteen of them would not be on a machine of eight. InferenceMAX's
    exports have degrees of experts that are both all ranks; elsewhere ranks are their product
    (AIConfigurator 0.7, generator/rule_plugin/trtllm.rule).
    """
    ep, moe_tp = _read_count(row["moe_ep_size"]), _read_count(row["moe_tp_size"])
    tp = max(_read_count(row["tp_size"]) if ep == 1 else ep, moe_tp)
    if ep * moe_tp == _read_count(row["tp_size"]) and not _is_of_inference_max(row):
        tp = ep * moe_tp
    dp = _read_count(row["attention_dp_size"])
    pp = _read_count(row["pp_size"])
    if row["backend"] == "vllm" and dp > 1 and ep == dp * dp:
        tp = ep = dp
        dp = 1
    return (
        {"tp": 1, "dp": tp, "pp": pp, "ep": ep}
        if dp > 1
        else {"tp": tp, "dp": 1, "pp": pp, "ep": ep}
    )


def _read_concurrency(row: Mapping[str, str]) -> int:
    """Return how many requests ran at a time on one replica: a batch for each rank of attention.

    The name has those of all replicas together, of which a run may have had many. A batch is what
    the row divided by the ranks that it has.
    """
    dp = _read_count(row["attention_dp_size"])
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
