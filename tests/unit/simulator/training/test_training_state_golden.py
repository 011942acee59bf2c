"""What ranks with the same parameters exchange in a step: a table, besides the laws of states."""

from collections import Counter
from typing import Any

from golden_table import Row, check_golden
from training_memory_graphs import chunk_graphs, memory_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.simulator.steps.state_collectives import ParameterGroup, exchange_states

_PARTS = ("forward", "backward_gather", "backward_reduction", "reduction", "gather")
_CASES: dict[str, dict[str, Any]] = {
    "replicas": {"dp": 4},
    "zero 1": {"dp": 4, "zero_stage": 1, "trainer": "megatron-core"},
    "zero 2": {"dp": 4, "zero_stage": 2, "tp": 2, "trainer": "internevo"},
    "zero 3": {"dp": 4, "zero_stage": 3, "trainer": "torchtitan"},
    "zero 3 in groups": {"dp": 8, "zero_stage": 3, "shard_degree": 4, "cp": 2},
    "zero 3 of lists": {"dp": 4, "zero_stage": 3, "trainer": "deepspeed-zero3-2021"},
    "isp": {"tp": 4, "dp": 2, "weight_parallel": "isp", "trainer": "internevo"},
    "stages": {"pp": 2, "dp": 2, "zero_stage": 1, "trainer": "megatron-lm-2022"},
    "sequence parallel": {"tp": 4, "sequence_parallel": True, "trainer": "megatron-core"},
    "experts": {
        "model": "qwen3-30b-a3b",
        "tp": 2,
        "dp": 8,
        "ep": 4,
        "zero_stage": 1,
        "trainer": "megatron-core",
    },
    "experts, zero 3": {"model": "gpt-oss-20b", "dp": 8, "ep": 4, "zero_stage": 3},
}


def test_every_exchange_is_as_kept() -> None:
    rows: list[Row] = []
    for name, changes in _CASES.items():
        trainer = TrainerSpec(profile=changes.get("trainer", "plain"))
        scenario = memory_scenario(**{**changes, "trainer": trainer, "topology": "h200_hgx"})
        chunk = chunk_graphs(scenario)[-1]
        found = exchange_states(chunk.forward, chunk.rank, scenario)
        for part in _PARTS:
            exchanges = Counter(map(_cells, getattr(found, part)))
            rows += [
                {"case": name, "part": part, "count": count, **dict(cells)}
                for cells, count in exchanges.items()
            ]
        rows.append({"case": name, "part": "update", "count": found.num_updated})
        host_us = f"{found.forward_host_us:g} and {found.backward_host_us:g} us"
        rows += [
            {"case": name, "part": "group", "dims": _describe(group), "role": host_us}
            for group in found.groups
        ]
    check_golden("training_exchanges", rows)


def _cells(node: OperatorNode) -> tuple[tuple[str, str | int], ...]:
    return (
        ("role", node.role),
        ("dims", " ".join(f"{name}={size}" for name, size in node.dims.items())),
        ("repeat", node.repeat),
        ("axis", node.axis),
        ("overlap", node.overlap.name.lower()),
        ("section", node.section.name.lower()),
    )


def _describe(group: ParameterGroup) -> str:
    layers = f"{sum(group.layer_params)} in layers of at most {group.num_layer_params}"
    held = group.ranks
    ranks = f"{held.shards} shards, {held.replicas} replicas, stride {held.stride}"
    return f"{group.name}: {group.num_params} parameters, {layers}, {ranks}"
