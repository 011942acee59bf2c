"""What fits leaves a device's driver, context and communicators their memory."""

from dataclasses import replace

import numpy as np
import pytest

from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.frameworks.trainer import find_trainer
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.memory import (
    TRAINING_AXES,
    ServingMemory,
    context_bytes,
    training_headroom_bytes,
    visible_bytes,
)
from foretoken.domain.results.training_report import StageMemory
from foretoken.domain.units import GIB

_ALONE = [1] * len(TRAINING_AXES)
_TRAINER = find_trainer("megatron-core")


def test_almost_all_of_a_device_does_not_fit() -> None:
    """79.52 of 80 GiB is more than a process can have, 78.9 is not."""
    device = find_device("a100_sxm_80")
    headroom = training_headroom_bytes(device, _TRAINER, _ALONE)

    margins = [
        StageMemory(
            stage=0,
            reserved_bytes=held * GIB,
            headroom_bytes=headroom,
            device_bytes=device.memory_bytes,
        ).margin_bytes
        for held in (79.52, 78.9)
    ]

    assert [margin >= 0 for margin in margins] == [False, True]


def test_each_axis_of_several_ranks_has_a_communicator() -> None:
    """A pair of ranks takes 544 MiB, more of them 688, whatever the axis."""
    device = find_device("h100_sxm")
    alone = training_headroom_bytes(device, _TRAINER, _ALONE)

    assert alone == device.memory_bytes - visible_bytes(device) + context_bytes(device)
    for axis in range(len(TRAINING_AXES)):
        taken = [
            training_headroom_bytes(
                device, _TRAINER, [degree if index == axis else 1 for index in range(5)]
            )
            - alone
            for degree in (2, 3, 64)
        ]
        assert taken == [544 * 2**20, 688 * 2**20, 688 * 2**20]


def test_columns_are_what_each_layout_has_alone() -> None:
    """The same line answers one layout and a column of them."""
    device = find_device("h100_sxm")
    columns = [np.array([1, 2, 8]), np.array([1, 4, 2]), *(np.ones(3, dtype=np.int64),) * 3]

    found = training_headroom_bytes(device, _TRAINER, columns)

    expected = [
        training_headroom_bytes(device, _TRAINER, [int(column[row]) for column in columns])
        for row in range(3)
    ]
    assert found.tolist() == expected


def test_a_trainers_own_figure_stands_for_the_rule() -> None:
    """What a trainer says it cannot have is all that it leaves; a CPU keeps nothing back."""
    own = replace(_TRAINER, context_bytes=3 * GIB)

    assert training_headroom_bytes(find_device("h100_sxm"), own, [8] * 5) == 3 * GIB
    assert training_headroom_bytes(find_device("cpu"), _TRAINER, [8] * 5) == 0


@pytest.mark.parametrize(
    ("rule", "expected_gib"), [("utilization", 79.5), ("static", 80.0), ("free", 79.5)]
)
def test_a_kv_cache_leaves_the_context_its_memory(rule: str, expected_gib: float) -> None:
    """Of 80 GiB that are all an engine's the context's half is not the KV cache's.

    Where weights and KV cache have a fixed share, graphs and activations must fit next to both.
    """
    memory = ServingMemory(
        usable_bytes=(79.5 if rule == "utilization" else 80) * GIB,
        weights_bytes=0.0,
        activations_bytes=0.0,
        kv_bytes_per_token=1.0,
        device_bytes=80 * GIB,
        context_bytes=GIB / 2,
        memory_rule=rule,
    )

    assert memory.kv_bytes == expected_gib * GIB
    assert bool(memory.infeasibility) == (rule == "static")


def test_engines_that_ask_for_all_of_a_device_get_what_is_free() -> None:
    """No engine's own share reaches into what its context holds."""
    device = find_device("h100_sxm")
    free = visible_bytes(device) - context_bytes(device)

    assert find_engine("vllm-0.20").memory_utilization_ratio * visible_bytes(device) < free
    assert free < visible_bytes(device) < device.memory_bytes
