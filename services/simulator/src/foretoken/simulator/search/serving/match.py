"""Deployments from engines: replicas that each do everything, and pairs of pools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.errors import UnknownTopologyError
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.cluster import KvTransferSpec
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingTargets
from foretoken.domain.units import US_PER_S
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.rank import links_of
from foretoken.simulator.search.serving.engine_answer import EngineAnswer, ReplicaAnswers
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.points import (
    PAIR_TTFT_ERROR_RATIO,
    Points,
    empty_points,
    join_points,
    mean_limit_us,
)
from foretoken.simulator.search.serving.prompt_queue import (
    PromptPasses,
    busiest_rps,
    random_wait_us,
)


def count_replicas(rate_rps: Floats, devices: int, max_devices: int, target_rps: float) -> Ints:
    """Return the fewest replicas of a rate each that carry the target; without one, all that fit.

    A replica that carries nothing is one replica.
    """
    if target_rps == 0.0:
        return np.full(len(rate_rps), max(max_devices // devices, 1), dtype=np.int64)
    needed = np.ceil(target_rps / np.maximum(rate_rps, 1e-12) - 1e-9)
    return np.where(rate_rps > 0.0, np.clip(needed, 1, 2**31), 1).astype(np.int64)


def pair_replicas(
    prefill_rps: Floats,
    decode_rps: Floats,
    devices: tuple[Ints, Ints],
    max_devices: int,
    *,
    counts_idle: bool,
) -> tuple[Ints, Ints]:
    """Return how many prefill and decode replicas match, entry by entry.

    The pair that carries most for each device, and of those the largest; where idle devices count
    the pair that carries most, and of those the smallest. Where not even one of each fits, one of
    each.
    """
    prefill_devices, decode_devices = devices
    best = np.zeros(len(prefill_rps))
    second = np.zeros(len(prefill_rps))
    num_prefill = np.ones(len(prefill_rps), dtype=np.int64)
    num_decode = np.ones(len(prefill_rps), dtype=np.int64)
    for num in range(1, max_devices):
        left = (max_devices - num * prefill_devices) // decode_devices
        if (left < 1).all():
            break
        ideal = num * prefill_rps / np.maximum(decode_rps, 1e-12)
        for rounded in (np.floor(ideal), np.ceil(ideal)):
            others = np.clip(rounded, 1, np.maximum(left, 1)).astype(np.int64)
            carried = np.minimum(num * prefill_rps, others * decode_rps)
            each = carried / (num * prefill_devices + others * decode_devices)
            value, other = (carried, each) if counts_idle else (each, carried)
            is_better = value > best * (1 + 1e-9)
            is_equal = (value >= best * (1 - 1e-9)) & (other > second)
            chosen = (left >= 1) & (is_better | is_equal)
            best = np.where(chosen, value, best)
            second = np.where(chosen, other, second)
            num_prefill = np.where(chosen, num, num_prefill)
            num_decode = np.where(chosen, others, num_decode)
    return num_prefill, num_decode


def make_aggregated(
    answers: Mapping[int, EngineAnswer], load: LoadProfile, max_devices: int, target_rps: float
) -> Points:
    """Return the deployments of every kind of engine at every setting, sized for the target.

    Without a target they take as many devices as there may be. `answers` are by their number.
    """
    return join_points(
        [
            _deployments(number, answer, load, (max_devices, target_rps))
            for number, answer in answers.items()
        ]
    )


def _deployments(
    number: int, answer: EngineAnswer, load: LoadProfile, size: tuple[int, float]
) -> Points:
    found = answer.aggregated
    max_devices, target_rps = size
    devices = answer.num_devices
    replicas = count_replicas(found.state.rate_rps[0], devices, max_devices, target_rps)
    carried = found.state.rate_rps * replicas
    points = empty_points(len(found.batch))
    used = load.context_mean / (load.prefill_mean + load.decode_mean)
    return replace(
        points,
        kind=points.kind + number,
        batch=found.batch,
        step_limit=found.step_limit,
        replicas=replicas,
        num_devices=replicas * devices,
        kv_ratio=found.batch / np.maximum(found.room, 1.0) * used * (found.room > 0),
        ttft_us=found.state.ttft_us,
        tpot_us=found.state.tpot_us,
        rate_rps=np.minimum(carried, target_rps) if target_rps else carried,
        verdict=found.verdict,
        reason=found.reason,
    )


# Where there is nothing to decode, or no time to.
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
    search: PairSearch, answers: Mapping[int, EngineAnswer]
) -> tuple[Points, dict[str, int]]:
    """Return the pairs of which each pool is possible, and how many others there are by verdict.

    Both pools run the same engine and format. A pool is ruled out where a prompt alone takes longer
    than the TTFT may be by more than the closed form may be wrong, or a step of decoding than the
    TPOT.
    """
    most_ttft_us = mean_limit_us(search, "ttft_ms") * PAIR_TTFT_ERROR_RATIO
    parts, counts = [], dict[str, int]()
    for first, prefill in answers.items():
        for second, decode in answers.items():
            if not _go_together(prefill, decode):
                continue
            ruled = [
                _rule_out(prefill.prefill, "ttft_ms", most_ttft_us),
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
    return all(
        getattr(prefill.kind, name) == getattr(decode.kind, name)
        for name in ("profile", "quantization", "speculation", "kv_tiers", "encodes_apart")
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
    passes = pools[0].passes.take(left)
    transfer_us = _transfer_us(search, pools[0])
    prefill_rps = _prefill_rps(search, pools[0].passes, transfer_us)[:, left]
    answer = max(search.load.decode_mean - 1, _NEVER)
    decode_us = decode.state.tpot_us[:, right] * answer + transfer_us
    decode_rps = decode.batch[right] / decode_us * US_PER_S
    numbers = _count_pools(search, pools, prefill_rps[0], decode_rps[0])
    carried = np.minimum(numbers[0] * prefill_rps, numbers[1] * decode_rps)
    if search.target_rps:
        carried = np.minimum(carried, search.target_rps)
    tpot_us = _tpot_us(decode, carried / numbers[1])
    # Clients have the first token once the cache is there and a step of the answers begins.
    ttft_us = _ttft_us(search, passes, carried / numbers[0], numbers[0])
    ttft_us += transfer_us + tpot_us / 2
    layouts = [pool.num_devices for pool in pools]
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
        ttft_us=ttft_us,
        tpot_us=tpot_us,
        rate_rps=carried,
    )


def _tpot_us(decode: ReplicaAnswers, rate_rps: Floats) -> Floats:
    """Return the TPOT where replicas decode at a rate: as many together as that takes."""
    rates, times = decode.state.rate_rps, decode.state.tpot_us
    tpot_us = [
        np.interp(rate, known, time)
        for rate, known, time in zip(rate_rps, rates, times, strict=True)
    ]
    return np.stack(tpot_us)


def _count_pools(
    search: PairSearch,
    pools: tuple[EngineAnswer, EngineAnswer],
    prefill_rps: Floats,
    decode_rps: Floats,
) -> tuple[Ints, Ints]:
    devices = [pool.num_devices for pool in pools]
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


def _prefill_rps(search: PairSearch, passes: PromptPasses, transfer_us: float) -> Floats:
    """Return what a prefill replica takes for prompts to wait no longer than the TTFT allows.

    Where they come at random to each by itself. Without a limit a prompt waits as long as it takes
    alone; where that is over the limit by less than the closed form may be wrong, as long as that
    leaves.
    """
    limit_us = mean_limit_us(search, "ttft_ms")
    alone_us = passes.alone_us + transfer_us
    if np.isinf(limit_us):
        left_us = alone_us
    else:
        most_us = np.where(alone_us[0] > limit_us, limit_us * PAIR_TTFT_ERROR_RATIO, limit_us)
        left_us = np.maximum(most_us - alone_us, 0.0)
    return busiest_rps(passes, search.load.prefill_second_ratio, left_us)


def _ttft_us(
    search: PairSearch, passes: PromptPasses, rate_rps: Floats, num_replicas: Ints
) -> Floats:
    """Return the time to the end of a prompt where each prefill replica takes them at a rate.

    In a closed loop requests that are all alike come back at the gaps in which their prompts were
    computed, so that none waits where that is one by one; what is computed together comes back
    together. Others come as if at random to whichever replica is free.
    """
    second_ratio = search.load.prefill_second_ratio
    wait_us = random_wait_us(passes, rate_rps, second_ratio, num_replicas)
    if search.load.is_even and not search.target_rps:
        wait_us = np.where(passes.is_single, 0.0, wait_us)
    ttft_us: Floats = passes.alone_us + wait_us
    return ttft_us


def _transfer_us(search: PairSearch, prefill: EngineAnswer) -> float:
    """Return what sending a prompt's KV cache takes."""
    bandwidth, latency_us = find_link(search.scenario, prefill.kind.device)
    num_tokens = search.load.prefill_mean
    in_window = min(num_tokens, stack_of(search.scenario.model).window)
    sent = num_tokens * prefill.kv_bytes_per_token + in_window * prefill.window_bytes_per_token
    sent += prefill.state_bytes
    return latency_us + sent / bandwidth * US_PER_S


def find_link(scenario: ServingScenario, device: str) -> tuple[float, float]:
    """Return what leaves a device for another replica goes over, as bytes/s and µs."""
    spec = scenario.cluster.kv_transfer if scenario.cluster else KvTransferSpec()
    bandwidth, latency_us = spec.bandwidth_bytes_per_s, spec.latency_us
    if bandwidth and latency_us:
        return bandwidth, latency_us
    link = _port(scenario, device)
    return bandwidth or link[0], latency_us or link[1]


def _port(scenario: ServingScenario, device: str) -> tuple[float, float]:
    """Return what a device has of its node's network, as bytes/s and µs; no wait where unknown."""
    try:
        topology = links_of(scenario, device)
    except UnknownTopologyError:
        return float("inf"), 0.0
    return topology.port_bytes_per_s, topology.inter_node.latency_us
