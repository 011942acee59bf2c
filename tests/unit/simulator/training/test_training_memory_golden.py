"""What strategies hold, to the byte: a table of answers, besides the laws of memory."""

from typing import Any

import pytest
from golden_table import Row, check_golden
from training_memory_graphs import chunk_needs, follow, memory_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.steps.held.in_flight import find_moments
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.training.memory_plan import measure_stages

_NEEDS = (*("saved", "forward", "backward", "weight_half", "largest_saved", "largest_passing"),)
_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero 1": {"dp": 4, "zero_stage": 1},
    "zero 2": {"dp": 4, "zero_stage": 2, "trainer": "internevo"},
    "zero 3": {"dp": 4, "zero_stage": 3, "trainer": "torchtitan"},
    "zero 3 in groups": {"dp": 8, "zero_stage": 3, "shard_degree": 4},
    "tensor": {"tp": 4, "recompute": "selective"},
    "tensor and sequence": {"tp": 4, "sequence_parallel": True, "trainer": "megatron-core"},
    "isp": {"tp": 4, "dp": 2, "weight_parallel": "isp", "trainer": "internevo"},
    "context ring": {"cp": 4, "trainer": "megatron-core"},
    "context all-to-all": {"cp": 4, "context_parallel": "all_to_all"},
    "pipeline": {"pp": 4, "micro_batch_size": 2, "trainer": "gpt-neox"},
    "interleaved": {"pp": 2, "virtual_stages": 4, "pipeline_schedule": "interleaved"},
    "gpipe": {"pp": 2, "pipeline_schedule": "gpipe", "global_batch_size": 6},
    "zero bubble": {"pp": 4, "pipeline_schedule": "zero_bubble_h1"},
    "zero bubble in a V": {"pp": 2, "virtual_stages": 2, "pipeline_schedule": "zero_bubble_v"},
    "both ways": {"pp": 4, "pipeline_schedule": "dualpipe"},
    "uneven": {"pp": 2, "stage_layers": (7, 9), "trainer": "megatron-core"},
    "recomputed": {"recompute": "full", "trainer": "megatron-lm-2021", "dtype": DType.FP16},
    "some recomputed": {"pp": 2, "recompute": "full", "recompute_layers": 3},
    "recomputed in parts": {"tp": 2, "recompute": "full", "partitions_activations": True},
    "gpt": {"model": "gpt-22b", "trainer": "megatron-lm-2022", "tp": 2, "dtype": DType.FP16},
    "fp8": {"trainer": "megatron-core", "dtype": DType.FP8},
    "experts": {"model": "gpt-oss-20b", "dp": 4, "ep": 4, "zero_stage": 1},
    "experts of Megatron-Core": {
        "model": "qwen3-30b-a3b",
        "tp": 2,
        "dp": 4,
        "ep": 4,
        "sequence_parallel": True,
        "zero_stage": 1,
        "trainer": "megatron-core",
    },
    "latent attention": {
        "model": "deepseek-v3",
        "pp": 4,
        "dp": 2,
        "ep": 2,
        "recompute": "selective",
    },
    "latent attention, zero 3": {"model": "deepseek-v3", "dp": 8, "ep": 4, "zero_stage": 3},
}


def _scenario(changes: dict[str, Any]) -> TrainingScenario:
    trainer = TrainerSpec(profile=changes.get("trainer", "plain"))
    return memory_scenario(**{**changes, "trainer": trainer})


def _rows(name: str, changes: dict[str, Any]) -> list[Row]:
    return [
        {
            "case": name,
            "stage": stage.stage,
            "weights": stage.weights_bytes,
            "gradients": stage.gradients_bytes,
            "optimizer": stage.optimizer_bytes,
            "activations": stage.activations_bytes,
            "temporary": stage.temporary_bytes,
            "reserved": stage.reserved_bytes,
            "in_flight": stage.num_in_flight,
            "largest": stage.largest,
        }
        for stage in measure_stages(_scenario(changes))
    ]


def test_every_part_of_memory_is_as_kept() -> None:
    rows = [row for name, changes in _CASES.items() for row in _rows(name, changes)]
    check_golden("training_memory", rows)


def test_what_every_pass_needs_is_as_kept() -> None:
    rows: list[Row] = []
    for name, changes in _CASES.items():
        scenario = _scenario(changes)
        needs = chunk_needs(scenario)
        for chunk in sorted({0, len(needs) - 1}):
            row = {column: getattr(needs[chunk], column) for column in _NEEDS}
            rows.append({"case": name, "chunk": chunk, **row})
    check_golden("training_memory_of_passes", rows)


def test_memory_over_a_step_is_as_kept() -> None:
    """After every pass, in MiB, of each rank of a short pipeline."""
    rows: list[Row] = []
    for name in ("pipeline", "zero bubble", "interleaved"):
        _, moments = follow(_scenario({**_CASES[name], "global_batch_size": 4}))
        for stage in sorted(set(moments.stage.tolist())):
            held = moments.bytes[moments.stage == stage] / 2**20
            text = " ".join(f"{mib:.1f}" for mib in held)
            rows.append({"case": name, "stage": stage, "held": text})
    check_golden("training_memory_over_a_step", rows)


@pytest.mark.parametrize("num_micro_batches", [1, 4, 8, 12, 16, 40])
def test_moments_are_those_of_all_micro_batches(num_micro_batches: int) -> None:
    """A steady state stands for the rest: most is held at a moment of the whole order, too."""
    for name, chunks in (
        ("one_f_one_b", 1),
        ("gpipe", 1),
        ("zero_bubble_h1", 1),
        ("interleaved", 2),
    ):
        schedule = find_schedule(name)
        if name == "interleaved" and num_micro_batches % 4:
            continue
        orders = schedule.orders(4, num_micro_batches, chunks)
        found = find_moments(schedule, 4, num_micro_batches, chunks)
        for rank, order in zip(found, orders, strict=True):
            assert int(rank.counts[:, 0].sum(axis=-1).max()) == _most_kept(order)


def _most_kept(order: Any) -> int:
    """Count micro batches kept whole while each slot runs, one by one."""
    kept, most = 0, 0
    for slot in order:
        most = max(most, kept)
        kept += sum(item.kind == "forward" for item in slot)
        kept -= sum(item.kind in {"backward", "backward_input"} for item in slot)
    return most
