"""What cannot be: layouts that do not divide, weights and KV caches that do not fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.grid import Floats
from foretoken.simulator.search.hardware_change import HardwareChange
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.space import EngineKind
from foretoken.simulator.serving.feasibility import count_kv_blocks, judge_feasibility

# The verdict of what an engine cannot do.
ENGINE = "engine"
# Limits at which memory is planned; between them room for the KV cache is linear in the batch.
_PLANNED_BATCHES = (1, 64, 256, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvRoom:
    """How many requests the KV cache of a replica holds, by batch; or why a replica cannot run.

    `kv_bytes_per_token` is of the rank that holds most, `window_bytes_per_token` what it also
    holds of each token in a sliding window.
    """

    num_requests: Floats
    reasons: tuple[str, ...]
    verdict: str = "memory"
    kv_bytes_per_token: float = 0.0
    window_bytes_per_token: float = 0.0


def find_kv_room(
    kind: EngineKind,
    base: ServingScenario,
    limit: int,
    batches: Sequence[int],
    load: LoadProfile,
    hardware: HardwareChange,
) -> KvRoom:
    """Return the room of a kind of replica whose steps compute at most `limit` tokens.

    `hardware` is what changes of the kind's device.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.
        InvalidRequestError: the model or the limits cannot be used.

    """
    if lacks := kind.find_lacks(base, "aggregated"):
        return KvRoom(
            num_requests=np.zeros(len(batches)), reasons=(lacks,) * len(batches), verdict=ENGINE
        )
    planned = sorted({*(b for b in _PLANNED_BATCHES if b < batches[-1]), batches[-1]})
    tokens, reasons, block_size, bytes_per_token = [], [], 1, (0.0, 0.0)
    for batch in planned:
        scenario = kind.scenario(base, batch, limit)
        engine = scenario.engine.resolve()
        device = hardware.change_device(find_device(scenario.device))
        memories, reason = judge_feasibility(scenario, engine, device)
        if not memories:
            return KvRoom(
                num_requests=np.zeros(len(batches)),
                reasons=(reason,) * len(batches),
                verdict="layout",
            )
        blocks = 0 if reason else count_kv_blocks(scenario, engine, memories)
        tokens.append(float(blocks * engine.block_size))
        reasons.append(reason)
        block_size = engine.block_size
        bytes_per_token = max(
            (memory.kv_bytes_per_token, memory.window_bytes_per_token) for memory in memories
        )
    # A request holds most when its last token is computed, in whole blocks.
    length = load.prefill_mean + load.decode_mean
    needed = np.ceil(length / block_size) * block_size
    room = np.interp(batches, planned, tokens)
    # Even one request has to fit, the longest.
    room = np.where(room >= load.longest, room, 0.0)
    nearest = np.searchsorted(planned, batches)
    return KvRoom(
        num_requests=np.floor(room / needed) * kind.layout.dp,
        reasons=tuple(reasons[index] for index in nearest),
        kv_bytes_per_token=bytes_per_token[0],
        window_bytes_per_token=bytes_per_token[1],
    )
