"""InternEvo's question: its points in its terms, as a request, and the answer.

Degrees of the pipeline are powers of two, those of sequences and weights 1, the even numbers to 8
and the multiples of 8. Sequences are split over a divisor of the key heads. Every micro batch size
divides a replica's samples into at least as many micro batches as there are stages. Weights are
split for `isp` alone. Optimizer states are tried over every number of the ranks that are left,
those that do not divide them included; so are degrees of weights that divide nothing.
Source: InternEvo, `simulation_train_formulaic.py` and `internlm/simulator/utils.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    OVERLAPS,
    WEIGHT_PARALLELS,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.simulator.grid import Ints
from foretoken.simulator.steps.strategies import (
    AXES,
    RECOMPUTE_MODES,
    Strategies,
    StrategySource,
    join_strategies,
)

_ALGORITHMS = ("isp", "msp", "fsp")
_RECOMPUTE = tuple(RECOMPUTE_MODES.index(mode) for mode in ("none", "full"))
# The profile's own: gradients and parameters are exchanged during computation. With experts the
# framework refuses both together.
_OVERLAP, _OVERLAP_OF_EXPERTS = OVERLAPS.index("data"), OVERLAPS.index("none")
_EVEN_TO = 8
_ZERO_STAGE = 1


def list_points(source: StrategySource, space: TrainingSpace) -> Strategies:
    """Return every point that is tried, those that cannot run among them.

    Of the space the clusters and global batch sizes count, of the scenario the model.
    """
    base = source.scenario
    parts = [
        _of_cluster(source, device, num_devices, batch)
        for device in range(len(source.devices))
        for num_devices in space.num_devices or (base.layout.num_devices,)
        for batch in space.global_batch_sizes or (base.global_batch_size,)
    ]
    return join_strategies(parts)


def list_degrees(most: int) -> list[int]:
    """Return the degrees of sequences or weights up to `most`."""
    even = range(2, min(most, _EVEN_TO) + 1, 2)
    return [1, *even, *range(2 * _EVEN_TO, most + 1, _EVEN_TO)]


def list_meshes(model: ModelArchitecture, num_devices: int) -> Iterator[tuple[int, int]]:
    """Yield the degrees of the pipeline and of sequences that cut the model and the devices."""
    num_key_heads = model.num_kv_heads
    for power in range(min(num_devices, model.num_layers).bit_length()):
        pp = 2**power
        for sp in list_degrees(min(num_devices, num_key_heads)):
            divides_model = num_key_heads % sp == 0 and model.hidden % sp == 0
            if divides_model and num_devices % (pp * sp) == 0:
                yield pp, sp


def list_micro_batches(num_samples: int, pp: int) -> list[int]:
    """Return the micro batch sizes of a replica that leave every stage one or more."""
    return [
        size
        for size in range(1, num_samples // pp + 1)
        if num_samples % size == 0 and num_samples // size >= pp
    ]


def _of_cluster(source: StrategySource, device: int, num_devices: int, batch: int) -> Strategies:
    parts = []
    for pp, sp in list_meshes(source.scenario.model, num_devices):
        dp = num_devices // (pp * sp)
        sizes = list_micro_batches(batch // dp, pp) if batch % dp == 0 else []
        shards = _list_shards(num_devices // pp, sp)
        parts.append(_cross(np.array(sizes, dtype=np.int64), shards, pp, sp))
    columns = {
        name: np.concatenate([part[name] for part in parts], dtype=np.int64)
        for name in (parts[0] if parts else {})
    }
    num_points = len(columns.get("pp", ()))
    constants = {
        "device": device,
        "num_devices": num_devices,
        "global_batch_size": batch,
        "virtual_stages": 1,
        "cp": 1,
        "ep": 1,
        "sequence_parallel": 0,
        "overlap": _OVERLAP_OF_EXPERTS if source.scenario.model.moe else _OVERLAP,
        "pipeline_schedule": 0,
    }
    for name, value in constants.items():
        columns[name] = np.full(num_points, value, dtype=np.int64)
    return Strategies(source=source, **{name: columns[name] for name in AXES})


def _list_shards(num_ranks: int, sp: int) -> np.ndarray:
    """Return one row each: algorithm, degree of weights, degree of states over a stage's ranks."""
    rows = []
    for algorithm in _ALGORITHMS:
        is_split = algorithm == "isp"
        for degree in list_degrees(num_ranks) if is_split else (sp,):
            num_states = np.arange(1, num_ranks // degree + 1)
            rows.append(
                np.stack(
                    [
                        np.full_like(num_states, WEIGHT_PARALLELS.index(algorithm)),
                        np.full_like(num_states, degree if is_split else 0),
                        num_states,
                    ]
                )
            )
    return np.concatenate(rows, axis=1)


def _cross(sizes: Ints, shards: np.ndarray, pp: int, sp: int) -> dict[str, Ints]:
    """Return every micro batch size with every way to shard, with and without recomputation."""
    num_shards, modes = shards.shape[1], np.array(_RECOMPUTE, dtype=np.int64)
    num_points = len(sizes) * len(modes) * num_shards
    algorithm, weight_degree, num_states = np.tile(shards, len(sizes) * len(modes))
    is_sharded = num_states > 1
    return {
        "pp": np.full(num_points, pp, dtype=np.int64),
        "tp": np.full(num_points, sp, dtype=np.int64),
        "micro_batch_size": np.repeat(sizes, len(modes) * num_shards),
        "recompute": np.tile(np.repeat(modes, num_shards), len(sizes)),
        "weight_parallel": algorithm,
        "weight_degree": weight_degree,
        "zero_stage": np.where(is_sharded, _ZERO_STAGE, 0),
        "shard_degree": np.where(is_sharded, num_states, 0),
    }


TRAINER = "internevo"
# Of its configurations of 7B and 70B models. Source: InternEvo, `configs/7B_internlm2.py`.
SEQUENCE_LENGTH = 2048
# All that fit: more than a cluster of thousands of devices has.
_MAX_CANDIDATES = 100_000


def build_request(
    model: ModelArchitecture,
    device: str,
    *,
    world_size: int,
    global_batch_size: int,
    sequence_length: int = SEQUENCE_LENGTH,
    num_finalists: int = 5,
) -> TrainingSearchRequest:
    """Return the search over the points of InternEvo's simulator; its batch counts tokens.

    Raises:
        InvalidRequestError: the batch is no multiple of the sequence length.

    """
    if global_batch_size < sequence_length or global_batch_size % sequence_length:
        raise InvalidRequestError.of_field(
            "global_batch_size",
            f"{global_batch_size:,} tokens are no multiple of the sequence length,"
            f" {sequence_length:,}",
        )
    scenario = TrainingScenario(
        name=f"{TRAINER}-{model.name}",
        model=model,
        device=device,
        layout=ParallelLayout(dp=world_size),
        sequence_length=sequence_length,
        global_batch_size=global_batch_size // sequence_length,
        trainer=TrainerSpec(profile=TRAINER),
    )
    space = TrainingSpace(num_devices=(world_size,), enumeration=TRAINER)
    return TrainingSearchRequest(
        scenario=scenario,
        space=space,
        num_finalists=num_finalists,
        max_candidates=_MAX_CANDIDATES,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class InternEvoTerms:
    """A strategy as InternEvo's configuration says it.

    `algo` is `tensor.mode`, `pp` `pipeline.size`, `sp` `tensor.size`, `wp` `weight.size` and `zo`
    `zero1.size`; `micro_bsz` and `micro_num` stand in `data`, `ckpt` is `model.checkpoint`.
    """

    algo: str
    pp: int
    sp: int
    wp: int
    zo: int
    micro_bsz: int
    micro_num: int
    ckpt: bool

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """Return the terms of a row of `StrategyColumns`."""
        is_isp = row["weight_parallel"] == "isp"
        num_replicas = int(row["dp"]) * int(row["cp"])
        if is_isp:
            num_replicas = num_replicas * int(row["tp"]) // max(1, int(row["weight_degree"]))
        shards = int(row["shard_degree"]) or num_replicas
        return cls(
            algo=str(row["weight_parallel"]) or "mtp",
            pp=int(row["pp"]),
            sp=int(row["tp"]),
            wp=max(1, int(row["weight_degree"])) if is_isp else 1,
            zo=shards if row["zero_stage"] else 1,
            micro_bsz=int(row["micro_batch_size"]),
            micro_num=int(row["num_micro_batches"]),
            ckpt=row["recompute"] == "full",
        )
