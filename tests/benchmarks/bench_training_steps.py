"""Training steps that others published for H100, H800, H200, B200 and GB200, compared row by row.

Run: python tests/benchmarks/bench_training_steps.py [--home FOLDER] [--tables NAME]
     [--rows NAME,...] [--detail]

The rows are those of `training_truth/hopper_blackwell_steps.csv`; the operators are those of the
whole import, of `--home` or made anew, then the starter's, as in a new installation. Nothing is
fitted to the rows. Prints every step predicted and measured, the peak of memory where it was
stated, whether the run is predicted to fit (all of them ran), then the errors by kind, how many are
inside their intervals, and the gain of FP8 over BF16 of runs that differ in nothing else.
`--detail` adds the parts of a step.
"""

import argparse
import csv
import dataclasses
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from operator_tables import STARTER, WHOLE, open_tables
from training_goals import JudgedStep, write_goals
from training_rows import narrow_weight_rules

from foretoken.client.facade import Foretoken
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import MlaSpec, ModelArchitecture, MoeSpec, find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import GIB
from foretoken.simulator.training.step import simulate_training

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_ROWS = Path("training_truth") / "hopper_blackwell_steps.csv"


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    scenario: TrainingScenario
    step_s: float
    allocated_gib: float
    reserved_gib: float

    @property
    def pair(self) -> str:
        """The row's name without its format: a run in another one differs in nothing else."""
        return self.name.replace("fp8", "").replace("bf16", "")


def main() -> None:
    """Print the rows and their errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", default="", help="folder of the whole import")
    parser.add_argument("--tables", action="append", choices=(WHOLE, STARTER), help="only these")
    parser.add_argument("--rows", default="", help="names of rows, or parts of them")
    parser.add_argument("--detail", action="store_true", help="show the parts of every step")
    options = parser.parse_args()
    path = _DATA / _ROWS
    if not path.is_file():
        sys.stdout.write(f"skipped: {path} is not on this machine\n")
        return
    wanted = [part for part in options.rows.split(",") if part]
    rows = [row for row in _read(path) if not wanted or any(part in row.name for part in wanted)]
    for name in options.tables or (WHOLE, STARTER):
        sys.stdout.write(f"== {name}\n")
        with open_tables(name, _DATA, options.home) as services:
            _compare(rows, services, is_detailed=options.detail)


def _compare(rows: list[_Row], services: Foretoken, *, is_detailed: bool) -> None:
    memory: dict[str, list[float]] = defaultdict(list)
    steps: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    judged: list[JudgedStep] = []
    for row in rows:
        report = simulate_training(row.scenario, services.predictor, None)
        step_s = report.step_time_ms / 1e3
        steps[row.pair][row.scenario.dtype.name.lower()] = (row.step_s, step_s)
        judged.append(JudgedStep.of_report(row.scenario, report, row.step_s, row.name))
        sys.stdout.write(
            f"{row.name:34} {row.step_s:8.3f} s, predicted {step_s:8.3f}, {judged[-1].error:+7.1%}"
            f"{''.join(_memory(row, report, memory))}"
            f"{'' if report.feasibility.is_feasible else ', predicted not to fit'}\n"
        )
        if is_detailed:
            sys.stdout.write(f"{_detail(report)}\n")
    _write_errors(judged, memory)
    write_goals(judged, _write_gains(steps), memory)


def _write_errors(judged: list[JudgedStep], memory: Mapping[str, list[float]]) -> None:
    errors: dict[str, list[float]] = defaultdict(list)
    of_kind: dict[str, list[JudgedStep]] = defaultdict(list)
    for step in judged:
        for key in (step.kind, step.kind.partition(",")[0], "all"):
            errors[key].append(step.error)
            of_kind[key].append(step)
    for label, found in (*errors.items(), *memory.items()):
        sys.stdout.write(
            f"{label}: {len(found)} rows, mean absolute error"
            f" {statistics.fmean(map(abs, found)):.1%}, median"
            f" {statistics.median(map(abs, found)):.1%}, signed {statistics.fmean(found):+.1%}\n"
        )
    for label, steps in of_kind.items():
        sys.stdout.write(
            f"inside their intervals, {label}: {sum(step.is_inside for step in steps)} of"
            f" {len(steps)}, median width {statistics.median(step.width for step in steps):.2f}"
            " of the step\n"
        )


def _write_gains(steps: Mapping[str, Mapping[str, tuple[float, float]]]) -> list[float]:
    """Print how much faster FP8 is than BF16, measured and predicted; return its errors."""
    gains = [
        (pair, both["bf16"][0] / both["fp8"][0], both["bf16"][1] / both["fp8"][1])
        for pair, both in steps.items()
        if {"bf16", "fp8"} <= set(both)
    ]
    for pair, measured, predicted in gains:
        sys.stdout.write(f"gain of FP8, {pair}: {measured:.2f}, predicted {predicted:.2f}\n")
    if gains:
        measured, predicted = (statistics.median(gain[i] for gain in gains) for i in (1, 2))
        sys.stdout.write(f"gain of FP8, median: {measured:.2f}, predicted {predicted:.2f}\n")
    return [predicted / measured - 1 for _, measured, predicted in gains]


def _memory(row: _Row, report: TrainingReport, memory: dict[str, list[float]]) -> Iterator[str]:
    for name, measured, predicted in (
        ("allocated", row.allocated_gib, max(s.total_bytes for s in report.memory)),
        ("reserved", row.reserved_gib, max(s.reserved_bytes for s in report.memory)),
    ):
        if measured:
            error = predicted / GIB / measured - 1
            memory[f"memory {name}, {row.scenario.dtype.name.lower()}"].append(error)
            yield f", {name} {predicted / GIB:.1f} of {measured:.1f} GiB {error:+.1%}"


def _detail(report: TrainingReport) -> str:
    groups = sorted(report.step_time_ms_by_group.items(), key=lambda item: -item[1])
    total = report.step_time_ms
    parts = ", ".join(f"{name} {ms / total:.1%}" for name, ms in groups if ms / total > 0.004)
    shares = ", ".join(f"{n} {r:.0%}" for n, r in report.step_time_ratio_by_provenance.items())
    return f"    {parts}\n    {shares}"


def _read(path: Path) -> Iterator[_Row]:
    with path.open(newline="") as text:
        for line in csv.DictReader(text):
            scenario = _scenario(line)
            if scenario is not None:
                yield _Row(
                    line["id"],
                    scenario,
                    float(line["step_time_s"]),
                    float(line["peak_alloc_gib"] or 0),
                    float(line["peak_reserved_gib"] or 0),
                )


def _scenario(line: Mapping[str, str]) -> TrainingScenario | None:
    """Return the scenario of a row; none of one whose source leaves rules unsaid."""
    if not line["recompute"] or "every other" in line["recompute"]:
        return None
    rules = json.loads(line["rules"] or "{}")
    for start, sourced in _SOURCED_RULES.items():
        rules.update(sourced if line["id"].startswith(start) else {})
    # With mxfp8 parameters are gathered in bf16 (Megatron-Bridge, docs/training/
    # moe-optimization.md).
    if line["trainer"] == "megatron-core" and "mxfp8" not in line["id"]:
        rules = {**narrow_weight_rules(line["device"]), **rules}
    number = {name: int(line[name]) for name in ("tp", "pp", "vpp", "cp", "dp", "ep", "zero")}
    modules = tuple(filter(None, line["recompute_modules"].split("+")))
    modules = ("core_attention",) if line["id"].startswith(_ATTENDING_AGAIN) else modules
    is_interleaved = number["vpp"] > 1
    return TrainingScenario(
        name=line["id"],
        model=_model(line["model"]),
        device=line["device"],
        topology=_NETWORKS.get((line["id"][: len("ibm-fsdp")], line["device"]), ""),
        dtype=DType[line["precision"].upper()],
        expert_tp=1 if line["id"].startswith(_WHOLE_EXPERTS) else 0,
        moe_capacity_factor=1.0 if line["id"].startswith(_DROPPING) else 0.0,
        layout=ParallelLayout(**{axis: number[axis] for axis in ("tp", "pp", "cp", "dp", "ep")}),
        micro_batch_size=int(line["mbs"]),
        global_batch_size=int(line["gbs"]),
        sequence_length=int(line["seq"]),
        zero_stage=number["zero"],
        sequence_parallel=number["tp"] > 1,
        recompute="selective" if modules else line["recompute"],
        recompute_modules=modules,
        pipeline_schedule="interleaved" if is_interleaved else "one_f_one_b",
        virtual_stages=number["vpp"],
        trainer=TrainerSpec(profile=line["trainer"], rules=rules),
    )


# What sources say of a run that the file leaves out.
_SOURCED_RULES: Mapping[str, Mapping[str, str]] = {
    # NVIDIA/NeMo, scripts/performance/llm/pretrain_deepseek_v3.py: DeepEP on H100. Of the model's
    # eight groups of experts, one a node, a token reaches four, which the preset has. Its container
    # (25.04.01) has Megatron-Core 0.12: latent attention turned by one kernel is of 0.13, a fused
    # router of 0.14.
    "dgxc-dsv3-bf16": {"sends_tokens_once": "true", "fuses_rope": "false", "router": "unfused"},
    "dgxc-grok": {"router": "unfused"},
    # AI-Hypercomputer/maxtext with Transformer Engine: cuDNN's attention, the rest compiled by XLA,
    # which fuses operators of elements with each other and with what converts them. Its batches are
    # zeros (NVIDIA/dgxc-benchmarking, maxtext/configure.sh, dataset_type=synthetic; maxtext,
    # input_pipeline_interface.py, raw_generate_synthetic_data), all rows alike and after 50 steps a
    # "loss: 0.000" (the recipe's README), so that power slows no product.
    "dgxc-maxtext": {
        "attention_library": "cudnn",
        "fuses_norm": "true",
        "fuses_rope": "true",
        "fuses_gate": "true",
        "fuses_bias_activation": "true",
        "fuses_norm_quantize": "true",
        "slowed_by_power": "false",
    },
    # NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs/qwen3/workload_base_configs.py of
    # 25.11: no other dispatcher than all-to-all, which later ones name for Qwen3 235B on B200.
    "br-25.11-qwen": {"sends_tokens_once": "false"},
    # NVIDIA-NeMo/Megatron-Bridge, skills/nemo-mbridge-perf-expert-parallel-overlap/SKILL.md and
    # docs/training/moe-optimization.md: without moe_permute_fusion; router and counts are a graph
    # in the second.
    "br-qwen30-bf16-a2a": {"fuses_permutation": "false"},
    "mem-qwen30-a2a": {"fuses_permutation": "false", "router": "captured"},
    # NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs/qwen/qwen3_workload_base_configs.py:
    # graphs of moe_router and moe_preprocess on H100 in BF16, and on B200.
    "br-qwen30-bf16-hybridep": {"router": "captured"},
    "br-26.02.01-qwen30-mxfp8-b200": {"router": "captured"},
    # alibaba/Pai-Megatron-Patch, examples/qwen3: run_mcore_qwen3.sh has no --moe-permute-fusion and
    # no --moe-router-fusion, and hides gradients and parameters; its README has FlashAttention, 3
    # only if one installs it.
    "pai-qwen30": {
        "fuses_permutation": "false",
        "router": "unfused",
        "overlaps_gradient_reduction": "true",
        "overlaps_parameter_gather": "true",
        "attention_library": "flash_2",
        # The same issue: expandable segments, which grow page by page.
        "reserved_ratio": "1",
    },
    # NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/perf_recipes/qwen (gb200/qwen3_moe.py and
    # common.py, _enable_hybridep_full_iteration_mxfp8): graphs of whole steps, whose exchanges of
    # experts are overlapped; HybridEP sends rows padded (Megatron-Core, experts.py of 2026).
    "card-qwen": {
        "launch_us": "0",
        "module_call_us": "0",
        "expert_call_us": "0",
        "waits_for_counts": "false",
        "overlaps_expert_exchange": "true",
        "pads_experts": "false",
    },
    # NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs/llama/llama3_llm_finetune.py
    # (disable_parameter_transpose_cache).
    "mem-llama70b": {"caches_weight_copies": "false"},
    # NVIDIA-NeMo/Megatron-Bridge, recipes/moonlight/moonlight_16b.py: gradients and moments in
    # bf16, no fused router; models/deepseek/deepseek_v3_bridge.py: apply_rope_fusion is off.
    "mem-moonlight": {
        "gradient_dtype": "bf16",
        "moment_dtype": "bf16",
        "fuses_rope": "false",
        "router": "unfused",
        # The same recipe collects garbage every five steps (manual_gc_interval), 175 ms each by
        # host_time_of_collection.py.
        "step_gap_us": "35000",
    },
    # foundation-model-stack/foundation-model-stack, fms/modules/layernorm.py and positions.py
    # (norms and rotation operator by operator in fp32, not compiled); foundation-model-stack/
    # fms-fsdp, fms_fsdp/policies/mixed_precision.py (gradients summed in bf16).
    "ibm-fsdp": {"gradient_dtype": "bf16"},
    # Compiled, as the rules in the file say of the gate.
    "mem-titan": {"fuses_norm": "true", "fuses_rope": "true"},
}
# 400 Gb/s between nodes of A100, 800 between those of H100, as the rows' notes say.
_NETWORKS = {
    ("ibm-fsdp", "a100_sxm_80"): "a100_roce_4x",
    ("ibm-fsdp", "h100_sxm"): "h100_roce_2x",
}
# alibaba/Pai-Megatron-Patch, issue 643: experts drop tokens beyond a capacity factor of 1.
_DROPPING = "pai-qwen30"
# The same recipe does not split experts over tensor parallelism.
_WHOLE_EXPERTS = "mem-moonlight"
# Its baseline runs attention again: NVIDIA-NeMo/Megatron-Bridge, skills/
# nemo-mbridge-perf-activation-recompute/SKILL.md, column recompute_modules.
_ATTENDING_AGAIN = "mem-llama70b-sft"


# Models of which there are no presets. Source: config.json of hpcai-tech/grok-1 and of
# moonshotai/Moonlight-16B-A3B on Hugging Face.
_MODELS = {
    "grok-1": ModelArchitecture(
        name="grok-1",
        num_layers=64,
        hidden=6144,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        intermediate=32768,
        vocab=131072,
        max_position=8192,
        moe=MoeSpec(num_experts=8, top_k=2, expert_intermediate=32768),
    ),
    "moonlight-16b-a3b": ModelArchitecture(
        name="moonlight-16b-a3b",
        num_layers=27,
        hidden=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        intermediate=11264,
        vocab=163840,
        max_position=8192,
        moe=MoeSpec(
            num_experts=64,
            top_k=6,
            expert_intermediate=1408,
            num_shared_experts=2,
            num_dense_layers=1,
            num_groups=1,
            top_k_groups=1,
        ),
        mla=MlaSpec(
            q_lora_rank=0,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
    ),
}


def _model(name: str) -> ModelArchitecture:
    """Return a preset; `-l21` at the end of its name are the layers that were left of it."""
    preset, _, layers = name.partition("-l")
    if layers.isdigit():
        return dataclasses.replace(find_model(preset), num_layers=int(layers))
    return _MODELS.get(name) or find_model(name)


if __name__ == "__main__":
    main()
