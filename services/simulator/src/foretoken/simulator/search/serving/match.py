"""Pairs of prefill and decode replicas, as many of each as match in rate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.cluster import KvTransferSpec
from foretoken.domain.errors import UnknownTopologyError
from foretoken.domain.hardware.topology import find_topology, topology_of_device
from foretoken.domain.scenario import ServingScenario
from foretoken.domain.search import ServingTargets
from foretoken.domain.units import US_PER_S
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.serving.engine_answer import EngineAnswer, ReplicaAnswers
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.points import Points, empty_points, join_points
from foretoken.simulator.search.serving.sizing import count_replicas, pair_replicas
from foretoken.simulator.search.serving.target import mean_limit_us

# A pool of replicas whose rate is met exactly has an endless queue.
_NEVER = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSearch:
    """What pairs are made for. Pairs with a pool ruled out by itself are counted by verdict."""

    scenario: ServingScenario
    targets: ServingTargets
    load: LoadProfile
    max_devices: int
    target_rps: float
    counts_idle: bool


def match_pairs(
    search: PairSearch, answers: Sequence[EngineAnswer]
) -> tuple[Points, dict[str, int]]:
    """Return the pairs of which each pool is possible, and how many others there are by verdict.

    Both pools run the same engine and format. A pool is ruled out where a prompt alone takes longer
    than the TTFT may be, or a step of decoding than the TPOT.
    """
    parts, counts = [], dict[str, int]()
    for first, prefill in enumerate(answers):
        for second, decode in enumerate(answers):
            if not _go_together(prefill, decode):
                continue
            ruled = [
                _rule_out(prefill.prefill, "ttft_ms", mean_limit_us(search, "ttft_ms")),
                _rule_out(decode.decode, "tpot_ms", mean_limit_us(search, "tpot_ms")),
            ]
            _count_pairs(ruled, counts)
            rows = [np.flatnonzero(verdict == "ok") for verdict in ruled]
            if len(rows[0]) and len(rows[1]):
                left, right = (grid.ravel() for grid in np.meshgrid(*rows, indexing="ij"))
                part = _make_pairs(search, (prefill, decode), (left, right))
                parts.append(replace(part, kind=part.kind + second, prefill_kind=part.kind + first))
    return join_points(parts), counts


def _go_together(prefill: EngineAnswer, decode: EngineAnswer) -> bool:
    return (prefill.kind.profile, prefill.kind.quantization) == (
        decode.kind.profile,
        decode.kind.quantization,
    )


def _rule_out(answers: ReplicaAnswers, metric: str, limit_us: float) -> np.ndarray:
    verdict = answers.verdict.copy()
    figures = answers.state.ttft_us if metric == "ttft_ms" else answers.state.tpot_us
    verdict[(verdict == "ok") & (figures[0] > limit_us)] = metric
    return verdict


def _count_pairs(ruled: Sequence[np.ndarray], counts: dict[str, int]) -> None:
    """Count the pairs with a pool that is ruled out, by what rules the first such out."""
    num_right = len(ruled[1])
    for verdict in ruled[0][ruled[0] != "ok"]:
        counts[verdict] = counts.get(verdict, 0) + num_right
    num_left = int((ruled[0] == "ok").sum())
    for verdict in ruled[1][ruled[1] != "ok"]:
        counts[verdict] = counts.get(verdict, 0) + num_left


def _make_pairs(
    search: PairSearch, pools: tuple[EngineAnswer, EngineAnswer], rows: tuple[Ints, Ints]
) -> Points:
    prefill, decode = pools[0].prefill, pools[1].decode
    left, right = rows
    service_us = prefill.state.ttft_us[:, left]
    busy = _most_busy(search, service_us)
    prefill_rps = prefill.state.rate_rps[:, left] * busy
    decode_us = decode.state.tpot_us[:, right] + _transfer_us(search, pools[0])
    answer = max(search.load.decode_mean - 1, _NEVER)
    decode_rps = decode.batch[right] / decode_us / answer * US_PER_S
    numbers = _count_pools(search, pools, prefill_rps[0], decode_rps[0])
    carried = np.minimum(numbers[0] * prefill_rps, numbers[1] * decode_rps)
    if search.target_rps:
        carried = np.minimum(carried, search.target_rps)
    load_ratio = carried / np.maximum(numbers[0] * prefill.state.rate_rps[:, left], _NEVER)
    layouts = [pool.kind.layout.num_devices for pool in pools]
    used = search.load.context_mean / (search.load.prefill_mean + search.load.decode_mean)
    return replace(
        empty_points(len(left)),
        batch=decode.batch[right],
        step_limit=decode.step_limit[right],
        replicas=numbers[1],
        prefill_batch=prefill.batch[left],
        prefill_limit=prefill.step_limit[left],
        prefill_replicas=numbers[0],
        num_devices=numbers[0] * layouts[0] + numbers[1] * layouts[1],
        kv_ratio=decode.batch[right] / np.maximum(decode.room[right], 1.0) * used,
        ttft_us=service_us + _wait_us(search, service_us, load_ratio, numbers[0]),
        tpot_us=_tpot_us(decode, carried / numbers[1], decode_us - decode.state.tpot_us[:, right]),
        rate_rps=carried,
    )


def _tpot_us(decode: ReplicaAnswers, rate_rps: Floats, transfer_us: Floats) -> Floats:
    """Return the TPOT where replicas decode at a rate: as many together as that takes.

    The transfer is on the way, not on the replica.
    """
    rates, times = decode.state.rate_rps, decode.state.tpot_us
    tpot_us = [
        np.interp(rate, known, time)
        for rate, known, time in zip(rate_rps, rates, times, strict=True)
    ]
    return np.stack(tpot_us) + transfer_us


def _count_pools(
    search: PairSearch,
    pools: tuple[EngineAnswer, EngineAnswer],
    prefill_rps: Floats,
    decode_rps: Floats,
) -> tuple[Ints, Ints]:
    devices = [pool.kind.layout.num_devices for pool in pools]
    if search.target_rps:
        return (
            count_replicas(prefill_rps, devices[0], search.max_devices, search.target_rps),
            count_replicas(decode_rps, devices[1], search.max_devices, search.target_rps),
        )
    ones = np.ones(len(prefill_rps), dtype=np.int64)
    return pair_replicas(
        prefill_rps,
        decode_rps,
        (ones * devices[0], ones * devices[1]),
        search.max_devices,
        counts_idle=search.counts_idle,
    )


def _most_busy(search: PairSearch, service_us: Floats) -> Floats:
    """Return how busy prefill replicas may be for prompts to wait no longer than the TTFT allows.

    Where they come at random to each replica by itself: M/G/1. Without a limit a prompt waits as
    long as it takes to compute.
    """
    limit_us = mean_limit_us(search, "ttft_ms")
    left_us = service_us if np.isinf(limit_us) else np.maximum(limit_us - service_us, 0.0)
    ratio = left_us / (service_us * search.load.prefill_second_ratio / 2)
    busy: Floats = ratio / (1.0 + ratio)
    return busy


def _wait_us(search: PairSearch, service_us: Floats, busy: Floats, num_replicas: Ints) -> Floats:
    """Return how long prompts wait for one another.

    In a closed loop requests that are all alike come back in the order and at the gaps in which
    their prompts were computed, so that none waits. Others come as if at random to whichever
    replica is free: M/G/c by Erlang's C and the spread of prompts (Lee and Longton, 1959).
    """
    if search.load.is_even and not search.target_rps:
        return np.zeros(service_us.shape)
    second = search.load.prefill_second_ratio / 2
    waiting = _erlang_c(busy * num_replicas, num_replicas)
    return service_us * second * waiting / num_replicas / np.maximum(1.0 - busy, _NEVER)


def _erlang_c(offered: Floats, num_servers: Ints) -> Floats:
    """Return the share of arrivals that find all servers busy: M/M/c, by Erlang's recursion."""
    blocked = np.ones(offered.shape)
    for server in range(1, int(num_servers.max(initial=1)) + 1):
        refused = offered * blocked / (server + offered * blocked)
        blocked = np.where(server <= num_servers, refused, blocked)
    busy = np.minimum(offered / num_servers, 1.0)
    found: Floats = blocked / np.maximum(1.0 - busy * (1.0 - blocked), _NEVER)
    return found


def _transfer_us(search: PairSearch, prefill: EngineAnswer) -> float:
    """Return what sending a prompt's KV cache adds to the time of each output token after it."""
    cluster = search.scenario.cluster
    spec = cluster.kv_transfer if cluster else KvTransferSpec()
    bandwidth, latency_us = spec.bandwidth_bytes_per_s, spec.latency_us
    if not bandwidth or not latency_us:
        link = _port(search.scenario, prefill.kind.device)
        bandwidth, latency_us = bandwidth or link[0], latency_us or link[1]
    num_tokens = search.load.prefill_mean
    in_window = min(num_tokens, search.scenario.model.sliding_window)
    sent = num_tokens * prefill.kv_bytes_per_token + in_window * prefill.window_bytes_per_token
    transfer_us = latency_us + sent / bandwidth * US_PER_S
    return transfer_us / max(search.load.decode_mean - 1, 1.0)


def _port(scenario: ServingScenario, device: str) -> tuple[float, float]:
    """Return what a device has of its node's network, as bytes/s and µs; no wait where unknown."""
    try:
        same = scenario.topology and device == scenario.device
        topology = find_topology(scenario.topology) if same else topology_of_device(device)
    except UnknownTopologyError:
        return float("inf"), 0.0
    return topology.port_bytes_per_s, topology.inter_node.latency_us
