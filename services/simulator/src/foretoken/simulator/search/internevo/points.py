"""Which points InternEvo's simulator tries for a number of devices and a global batch.

Degrees of the pipeline are powers of two, those of sequences and weights 1, the even numbers to 8
and the multiples of 8. Sequences are split over a divisor of the key heads. Every micro batch size
divides a replica's samples into at least as many micro batches as there are stages. Weights are
split for `isp` alone. Optimizer states are tried over every number of the ranks that are left,
those that do not divide them included; so are degrees of weights that divide nothing.
Source: InternEvo, `simulation_train_formulaic.py` and `internlm/simulator/utils.py`.
"""

from collections.abc import Iterator

import numpy as np

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.training_search import OVERLAPS, WEIGHT_PARALLELS, TrainingSpace
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
