"""Error of peak memory against what others measured: allocated and reserved, row by row.

Run: python tests/benchmarks/bench_training_memory.py [DATA_FOLDER]

Memory needs no predictor: sizes follow from the model, the layout and the framework's rules. Runs
that differ in the number of micro batches only are one row, as their memory is the same.
"""

import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from training_rows import read_steps

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import StageMemory
from foretoken.domain.units import GIB
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.training.memory.measure import measure_memory

_DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_MIB = 2**20
# Of the tables that do not say: the default of its Llama 3 recipes.
_TORCHTITAN_LENGTH = 8192
# What torch.compile does to a layer, in torchtitan's rules.
_COMPILED_RULES = {
    "fuses_gate": "true",
    "fuses_bias_activation": "true",
    "keeps_unread_outputs": "false",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A measured peak in GiB (0: not stated); of the first rank only, or of the fullest."""

    source: str
    label: str
    scenario: TrainingScenario
    allocated_gib: float
    reserved_gib: float
    is_first_rank: bool = False


def main(data: Path) -> None:
    """Print predicted and measured peaks, and the errors of each source."""
    if not (data / "training_truth" / "measured_steps.csv").is_file():
        _say(f"skipped: {data / 'training_truth'} is not on this machine")
        return
    allocated: dict[str, list[float]] = defaultdict(list)
    reserved: dict[str, list[float]] = defaultdict(list)
    _say(f"{'':64} {'allocated GiB':^24} {'reserved GiB':^24}")
    for row in _rows(data):
        stages = measure(row.scenario)
        fullest = max(stages, key=lambda stage: stage.total_bytes)
        stage = stages[0] if row.is_first_rank else fullest
        pairs = (
            (stage.total_bytes / GIB, row.allocated_gib, allocated),
            (stage.reserved_bytes / GIB, row.reserved_gib, reserved),
        )
        cells = []
        for predicted, measured, errors in pairs:
            if measured:
                errors[row.source].append(predicted / measured - 1)
            text = f"{measured:7.2f} {predicted / measured - 1:+7.2%}" if measured else f"{'-':>16}"
            cells.append(f"{predicted:7.2f} {text}")
        _say(f"{row.label:64} {cells[0]} {cells[1]}  {stage.largest}")
    for name, errors in (("allocated", allocated), ("reserved", reserved)):
        for source, found in errors.items():
            mean = statistics.fmean(abs(error) for error in found)
            _say(f"{source}, {name}: {len(found)} rows, {mean:.2%} mean absolute error")


def measure(scenario: TrainingScenario) -> Sequence[StageMemory]:
    """Return the memory of every rank of the pipeline."""
    orders = find_schedule(scenario.pipeline_schedule).orders(
        scenario.layout.pp, scenario.num_micro_batches, scenario.virtual_stages
    )
    memory, _ = measure_memory(scenario, orders)
    return memory


def _rows(data: Path) -> Iterator[_Row]:
    seen = set()
    for step in read_steps(data / "training_truth"):
        key = (step.label, step.scenario.sequence_length)
        if step.peak_gib and key not in seen:
            seen.add(key)
            yield _Row(
                source=step.source,
                label=f"{step.label} s {step.scenario.sequence_length}",
                scenario=step.scenario,
                allocated_gib=step.peak_gib,
                reserved_gib=step.reserved_gib,
            )
    yield from _fine_tuned()
    yield from _gpumodeling(data / "gpumodeling" / "truth")
    yield from _torchtitan(data / "training_truth" / "measured_steps.csv")


# Fine-tuning Llama 3 70B in FP8 on 32 H100: tensors, stages, chunks, module run again, GB (1e9) at
# the peak. Source: NVIDIA-NeMo/Megatron-Bridge, skills/nemo-mbridge-perf-memory-tuning/SKILL.md at
# 9e12bbd and nemo-mbridge-perf-activation-recompute; what the recipe sets as in
# bench_training_steps.py.
_FINE_TUNED = (
    (4, 4, 5, "core_attention", 58.8),
    (4, 4, 10, "core_attention", 60.2),
    (4, 4, 5, "mlp", 55.6),
    (4, 8, 5, "core_attention", 53.2),
    (8, 4, 5, "core_attention", 50.2),
)
_FINE_TUNING_RULES = {
    "gradient_dtype": "bf16",
    "keeps_narrow_weights": "true",
    "caches_weight_copies": "false",
}


def _fine_tuned() -> Iterator[_Row]:
    for tp, pp, virtual_stages, module, peak_gb in _FINE_TUNED:
        layout = ParallelLayout(tp=tp, pp=pp, dp=32 // (tp * pp))
        yield _Row(
            source="Megatron-Bridge",
            label=f"llama-3-70b fp8, tp{tp} pp{pp} chunks{virtual_stages} {module}",
            scenario=TrainingScenario(
                model=find_model("llama-3-70b"),
                device="h100_sxm",
                dtype=DType.FP8,
                layout=layout,
                micro_batch_size=1,
                global_batch_size=32,
                sequence_length=4096,
                zero_stage=1,
                sequence_parallel=True,
                recompute="selective",
                recompute_modules=(module,),
                pipeline_schedule="interleaved",
                virtual_stages=virtual_stages,
                trainer=TrainerSpec(profile="megatron-core", rules=_FINE_TUNING_RULES),
            ),
            allocated_gib=peak_gb * 1e9 / GIB,
            reserved_gib=0.0,
        )


def _gpumodeling(folder: Path) -> Iterator[_Row]:
    """Yield the jobs of GPUModeling: what DeepSpeed logged of its first rank."""
    measured = {row["config_id"]: row for row in _read(folder / "steps.csv") if row["mem_max_mb"]}
    for row in _read(folder / "configs.csv"):
        if row["config_id"] in measured and row["paper_run"] == "1":
            memory = measured[row["config_id"]]
            yield _Row(
                source="GPUModeling",
                label=row["config_id"],
                scenario=_gpumodeling_scenario(row),
                allocated_gib=float(memory["mem_max_mb"]) * _MIB / GIB,
                reserved_gib=float(memory["mem_reserved_mb"]) * _MIB / GIB,
                is_first_rank=True,
            )


def _torchtitan(path: Path) -> Iterator[_Row]:
    """Yield torchtitan's H100 tables; its memory is what the allocator reserved at most.

    Layers are recomputed whole, or by operator; a pipeline has as many micro batches as ranks.
    Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, and its
    components/metrics.py.
    """
    for row in _read(path):
        is_table = "torchtitan" in row["source"] and bool(row["peak_alloc_gib"])
        if not is_table:
            continue
        is_compiled = "eager" not in row["notes"]
        layout = ParallelLayout(**{axis: int(row[axis]) for axis in ("tp", "pp", "dp", "cp")})
        local_batch = int(row["notes"].split("local batch ")[1].split(";")[0])
        is_interleaved = "Interleaved" in row["notes"]
        scenario = TrainingScenario(
            model=find_model(row["model"].replace("Llama3.1", "llama-3.1").lower()),
            device="h100_sxm",
            layout=layout,
            sequence_length=int(row["seq"] or _TORCHTITAN_LENGTH),
            micro_batch_size=max(1, local_batch // layout.pp),
            global_batch_size=local_batch * layout.dp,
            trainer=TrainerSpec(profile="torchtitan", rules=_COMPILED_RULES if is_compiled else {}),
            pipeline_schedule="interleaved" if is_interleaved else "one_f_one_b",
            virtual_stages=2 if is_interleaved else 1,
            recompute=row["recompute"],
            zero_stage=3,
            sequence_parallel=layout.tp > 1,
        )
        degrees = f"tp {layout.tp} pp {layout.pp} dp {layout.dp} cp {layout.cp}"
        yield _Row(
            source="torchtitan",
            label=(
                f"{row['model']} {degrees} {scenario.pipeline_schedule}"
                f" s {scenario.sequence_length}{'' if is_compiled else ' eager'}"
            ),
            scenario=scenario,
            allocated_gib=0.0,
            reserved_gib=float(row["peak_alloc_gib"]),
        )


def _gpumodeling_scenario(row: dict[str, str]) -> TrainingScenario:
    name = "gpt-neox-20b" if row["model"].startswith("GPT") else "llemma-7b"
    is_perlmutter = row["cluster"] == "perlmutter"
    has_flash = row["attention"].startswith("flash")
    layout = ParallelLayout(tp=int(row["tp"]), pp=int(row["pp"]), dp=int(row["dp"]))
    return TrainingScenario(
        model=find_model(name),
        device="a100_sxm_40" if is_perlmutter else "gh200",
        topology="a100_perlmutter" if is_perlmutter else "gh200_infiniband",
        framework="pytorch",
        dtype=DType.FP16,
        layout=layout,
        sequence_length=int(row["seq"]),
        micro_batch_size=int(row["mbs"]),
        global_batch_size=int(row["global_batch"]),
        trainer=TrainerSpec(
            profile="gpt-neox", rules={"attention": "flash" if has_flash else "unfused"}
        ),
        stage_layers=tuple(int(part) for part in row["stage_layers"].split("|")),
        recompute="full",
        partitions_activations=row["partition_activations"] == "1",
        zero_stage=1,
    )


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else _DEFAULT_DATA)
