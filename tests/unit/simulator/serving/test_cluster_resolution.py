"""From the specification of a cluster to the pools that run: counts, ports, transfers."""

from dataclasses import replace
from typing import Any

import pytest
from serving_fakes import build_scenario

from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.cluster import (
    AutoscalingSpec,
    ClusterSpec,
    KvTransferSpec,
    LoraSpec,
    ReplicaPool,
)
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cluster.fleet import pool_scenarios
from foretoken.simulator.cluster.setup import (
    ClusterSetup,
    ResolvedPool,
    as_cluster,
    set_up_cluster,
)
from foretoken.simulator.serving.feasibility import plan_memories


def _set_up(scenario: ServingScenario) -> ClusterSetup:
    pools = [
        ResolvedPool(
            scenario=part,
            engine=part.engine.resolve(),
            memories=plan_memories(part, part.engine.resolve()),
        )
        for part in pool_scenarios(scenario)
    ]
    return set_up_cluster(scenario, pools)


def _disaggregated(layout: ParallelLayout, **changes: Any) -> ServingScenario:
    pools = (
        ReplicaPool(name="prompts", role="prefill", layout=layout),
        ReplicaPool(name="answers", role="decode", layout=layout),
    )
    transfer = changes.pop("kv_transfer", KvTransferSpec())
    return build_scenario(**changes, cluster=ClusterSpec(pools=pools, kv_transfer=transfer))


@pytest.mark.parametrize(
    ("model", "layout", "num_parts"),
    [
        ("llama-3-8b", ParallelLayout(), 1),
        ("llama-3-8b", ParallelLayout(tp=4), 4),
        # 32 layers in two stages of 16.
        ("llama-3-8b", ParallelLayout(tp=2, pp=2), 4),
        # 4 heads of keys and values: over 8 devices each is there twice.
        ("qwen3-30b-a3b", ParallelLayout(tp=8), 4),
        # All heads share one latent cache, which every device keeps whole.
        ("deepseek-v3", ParallelLayout(tp=8), 1),
    ],
)
def test_a_replica_sends_as_many_parts_at_once_as_it_has_different_ones(
    model: str, layout: ParallelLayout, num_parts: int
) -> None:
    transfer = KvTransferSpec(bandwidth_bytes_per_s=1e9, latency_us=7)
    scenario = _disaggregated(
        layout, model=find_model(model), device="h200_sxm", kv_transfer=transfer
    )
    setup = _set_up(scenario)
    assert [pool.port_bytes_per_s for pool in setup.pools] == pytest.approx([num_parts * 1e9] * 2)
    assert setup.kv_transfer.latency_ns == 7000


def test_a_cache_is_counted_once_however_many_devices_keep_it() -> None:
    """Llama 3 8B: 32 layers, keys and values, 8 heads of 128, 2 bytes each."""
    for layout in (ParallelLayout(), ParallelLayout(tp=4), ParallelLayout(pp=2)):
        scenario = _disaggregated(layout, model=find_model("llama-3-8b"), device="h200_sxm")
        assert _set_up(scenario).kv_transfer.bytes_per_token == 32 * 2 * 8 * 128 * 2


def test_a_cache_is_counted_once_however_many_ranks_split_contexts() -> None:
    whole, split = (
        _disaggregated(
            ParallelLayout(tp=8),
            model=find_model("deepseek-v3"),
            device="h200_sxm",
            engine=EngineSpec(profile="plain", rules={"decode_context_parallel": degree}),
        )
        for degree in ("1", "8")
    )
    sent = [_set_up(each).kv_transfer.bytes_per_token for each in (whole, split)]
    assert sent[0] == sent[1] > 0


def test_layers_with_a_window_send_what_is_in_it() -> None:
    """gpt-oss 20B: 12 of 24 layers see the last 128 tokens; 8 heads of 64, 2 bytes each."""
    scenario = _disaggregated(
        ParallelLayout(tp=2),
        model=find_model("gpt-oss-20b"),
        device="h200_sxm",
        kv_transfer=KvTransferSpec(bandwidth_bytes_per_s=1e9, latency_us=7),
    )
    setup = _set_up(scenario)
    half_bytes = 12 * 2 * 8 * 64 * 2
    assert setup.kv_transfer.bytes_of(100) == 100 * 2 * half_bytes
    assert setup.kv_transfer.bytes_of(4000) == 4000 * half_bytes + 128 * half_bytes
    assert [pool.port_bytes_per_s for pool in setup.pools] == pytest.approx([2e9] * 2)


@pytest.mark.parametrize(
    ("topology", "bytes_per_s"),
    [
        ("a100_selene", 25e9 * 0.96),
        # Four ports for eight devices, and 75 % of the rate of a port is reached.
        ("a100_roce_4x", 12.5e9 * 4 / 8 * 0.75),
    ],
)
def test_a_port_has_its_share_of_the_nodes_network(topology: str, bytes_per_s: float) -> None:
    scenario = _disaggregated(ParallelLayout(), device="a100_sxm_80", topology=topology)
    assert [pool.port_bytes_per_s for pool in _set_up(scenario).pools] == pytest.approx(
        [bytes_per_s] * 2
    )


def test_there_are_engines_for_all_replicas_there_may_ever_be() -> None:
    scaling = AutoscalingSpec(policy="queue_length", max_replicas=5)
    pools = (
        ReplicaPool(name="fixed", num_replicas=3),
        ReplicaPool(name="scaled", num_replicas=2, autoscaling=scaling),
    )
    fixed, scaled = _set_up(build_scenario(cluster=ClusterSpec(pools=pools))).pools
    assert (fixed.num_replicas, fixed.engines.num_engines) == (3, 3)
    assert (scaled.num_replicas, scaled.engines.num_engines) == (2, 5)


def test_engines_that_share_experts_are_one_replica() -> None:
    pool = ReplicaPool(name="experts", num_replicas=2, layout=ParallelLayout(dp=4, ep=4))
    scenario = build_scenario(
        model=find_model("mixtral-8x7b"), device="h200_sxm", cluster=ClusterSpec(pools=(pool,))
    )
    (found,) = _set_up(scenario).pools
    assert (found.engines.num_engines, found.engines_per_replica) == (8, 4)
    assert found.engines.is_lock_step
    assert scenario.num_devices == 8


def test_adapters_load_over_the_link_of_each_device_at_once() -> None:
    """Two devices load their halves of what they split, so it takes less than one of the whole."""
    lora = LoraSpec(num_adapters=4, max_loaded=2, rank=8, load_bytes_per_s=1e9)
    one = build_scenario(lora=lora, device="h200_sxm")
    (alone,) = _set_up(as_cluster(one)).pools
    (split,) = _set_up(as_cluster(replace(one, layout=ParallelLayout(tp=2)))).pools
    assert alone.adapters is not None
    assert split.adapters is not None
    assert alone.adapters.max_loaded == 2
    assert alone.adapters.load_ns / 2 <= split.adapters.load_ns < alone.adapters.load_ns


def test_data_parallel_replicas_become_those_of_a_pool() -> None:
    scenario = as_cluster(build_scenario(layout=ParallelLayout(tp=2, dp=3)))
    assert scenario.cluster is not None
    (pool,) = scenario.cluster.pools
    assert (pool.num_replicas, pool.layout) == (3, ParallelLayout(tp=2))
    assert scenario.num_devices == 6
    shared = as_cluster(build_scenario(layout=ParallelLayout(dp=4, ep=4)))
    assert shared.cluster is not None
    assert shared.cluster.pools[0].num_replicas == 1
    assert shared.num_devices == 4
