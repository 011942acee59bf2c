"""A candidate as the scenario that simulates it, or that is written out to be deployed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd

from foretoken.domain.requests.cluster import (
    ClusterSpec,
    ReplicaPool,
    RoutingSpec,
    settle_speculation,
)
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.domain.units import US_PER_S
from foretoken.simulator.search.serving.engine_answer import EngineAnswers
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.points import Points
from foretoken.simulator.search.serving.space import SearchSpace

# Rounds of all requests under way until what comes of filling a deployment is worked off, and the
# requests that are looked at then: ten are above their P99.
_WARM_UP_ROUNDS, _NUM_MEASURED = 6, 1000
# Prompts on a prefill replica for each that is computed: the caches of others are on their way to
# where their answers are decoded. Steps are limited by their tokens.
_HELD_PROMPTS = 16
# The router that gives a request of a full closed loop to the replica that has just completed one.
_KEEPS_APART = "least_outstanding"
# Arrivals that can be given a rate.
_RATED = frozenset({"poisson", "gamma", "constant", "markov"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateLoad:
    """What a deployment is run with: a share of the load it is proposed for, on one of its parts.

    The deployment is `num_parts` alike. At least `num_measured` requests are looked at, after
    `num_rounds` times as many as are under way; at the end come once more as many.
    """

    ratio: float = 1.0
    num_parts: int = 1
    num_rounds: int = _WARM_UP_ROUNDS
    num_measured: int = _NUM_MEASURED


PROPOSED = CandidateLoad()


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateMaker:
    """Makes scenarios of the points of a search."""

    request: ServingSearchRequest
    space: SearchSpace
    answers: EngineAnswers
    load: LoadProfile
    points: Points

    def scenario(self, row: int, name: str, load: CandidateLoad = PROPOSED) -> ServingScenario:
        """Return the deployment of a point, or a part of it, under a load."""
        kind = self.answers.engines[int(self.points.kind[row])].kind
        base = self.request.scenario
        base = replace(base, speculative=settle_speculation(kind.speculation, base.speculative))
        workload = self._workload(row, load)
        pools = tuple(
            replace(pool, num_replicas=pool.num_replicas // load.num_parts)
            for pool in self._pools(row)
        )
        router = self.space.routers[int(self.points.router[row])]
        if self._is_plain(row, pools):
            return _plain(base, pools[0], name, workload)
        cluster = ClusterSpec(pools=pools, routing=RoutingSpec(router=router))
        if base.cluster:
            failures = base.cluster.failures
            cluster = replace(
                base.cluster,
                pools=pools,
                routing=replace(base.cluster.routing, router=router),
                # Outages are listed by pools that the candidate has not.
                failures=replace(failures, outages=()) if failures else None,
            )
        last = pools[-1]
        return replace(
            base,
            name=name,
            device=last.device,
            topology=last.topology,
            layout=last.layout or base.layout,
            engine=last.engine or base.engine,
            quantization=last.quantization,
            cluster=cluster,
            workload=workload,
        )

    def count_parts(self, row: int) -> int:
        """Return how many equal parts a deployment has that know nothing of each other.

        In a closed loop that fills all replicas the router sends a request where one was completed,
        so every replica has a closed loop of its own; of pools the least that has the same shares
        of prefill and decode replicas.
        """
        base, points = self.request.scenario, self.points
        router = self.space.routers[int(points.router[row])]
        cluster = base.cluster
        is_shared = cluster is not None and (
            cluster.failures is not None
            or cluster.routing.load_interval_ms > 0
            or cluster.routing.max_outstanding > 0
            or any(pool.autoscaling for pool in cluster.pools)
        )
        kind = self.answers.engines[int(self.points.kind[row])].kind
        tiers = base.engine.with_tiers(kind.kv_tiers).kv_tiers
        is_shared |= self.points.encoders[row] > 0 or any(tier.is_shared for tier in tiers)
        if not self.is_loop or is_shared or base.lora or router != _KEEPS_APART:
            return 1
        num_replicas = int(points.replicas[row])
        has_pools = points.prefill_kind[row] >= 0
        return gcd(num_replicas, int(points.prefill_replicas[row]) if has_pools else 0)

    def count_under_way(self, row: int, load: CandidateLoad = PROPOSED) -> int:
        """Return how many requests are under way at a load; 0 where the workload has its own."""
        if self._has_own_times:
            return 0
        answer = max(self.load.decode_mean - 1.0, 0.0)
        each_us = self.points.ttft_us[0, row] + answer * self.points.tpot_us[0, row]
        rate_rps = float(self.points.rate_rps[0, row]) * load.ratio
        return max(round(rate_rps * float(each_us) / US_PER_S / load.num_parts), 1)

    def count_measured(self, row: int, load: CandidateLoad = PROPOSED) -> int:
        """Return how many requests are looked at: one round of them at the least."""
        return max(load.num_measured, self.count_under_way(row, load))

    @property
    def _has_own_times(self) -> bool:
        """Whether requests come when a trace or a conversation says."""
        spec = self.request.scenario.workload
        return spec.arrival == "trace" or spec.sessions is not None

    @property
    def is_loop(self) -> bool:
        """Whether candidates are run as closed loops: nothing says when requests arrive."""
        return not self._has_own_times and not self.request.target_rps

    def _is_plain(self, row: int, pools: Sequence[ReplicaPool]) -> bool:
        """Whether a deployment needs no cluster: one replica, or several taken in turns."""
        router = self.space.routers[int(self.points.router[row])]
        has_one_engine = self.answers.engines[int(self.points.kind[row])].kind.layout.dp == 1
        return (
            self.request.scenario.cluster is None
            and self.request.scenario.lora is None
            and self.points.prefill_kind[row] < 0
            and not self.points.encoders[row]
            and (router == "round_robin" or pools[0].num_replicas == 1)
            and has_one_engine
        )

    def _pools(self, row: int) -> tuple[ReplicaPool, ...]:
        points = self.points
        decode = self._pool(
            int(points.kind[row]), int(points.batch[row]), int(points.step_limit[row])
        )
        decode = replace(decode, num_replicas=int(points.replicas[row]))
        encoders = self._encoders(row, decode)
        if points.prefill_kind[row] < 0:
            return (*encoders, decode)
        batch = int(points.prefill_batch[row])
        limit = min(int(points.prefill_limit[row]), ceil(batch * self.load.prefill_mean))
        prefill = self._pool(int(points.prefill_kind[row]), _HELD_PROMPTS * batch, limit)
        replicas = int(points.prefill_replicas[row])
        prefill = replace(prefill, name="prefill", role="prefill", num_replicas=replicas)
        # What decodes reads no prompt from a store.
        engine = decode.engine and replace(decode.engine, kv_tiers=())
        return (*encoders, prefill, replace(decode, name="decode", role="decode", engine=engine))

    def _encoders(self, row: int, decode: ReplicaPool) -> tuple[ReplicaPool, ...]:
        """Return the pool that encodes images apart, on devices as the answers'; none if none."""
        num_replicas = int(self.points.encoders[row])
        if not num_replicas:
            return ()
        pool = replace(decode, name="encoders", role="encoder", num_replicas=num_replicas)
        return (replace(pool, layout=None, engine=None),)

    def _pool(self, kind: int, batch: int, step_limit: int) -> ReplicaPool:
        base = self.request.scenario
        found = self.answers.engines[kind].kind
        replica = found.scenario(base, batch, step_limit)
        return ReplicaPool(
            name="replicas",
            device=found.device,
            topology=replica.topology,
            layout=found.layout,
            engine=replica.engine,
            quantization=found.quantization,
            device_usd_per_hour=self.request.space.usd_per_hour.get(found.device, 0.0),
        )

    def _workload(self, row: int, load: CandidateLoad) -> WorkloadSpec:
        """Return the workload at a load: its rate, or the requests under way.

        Traces and conversations are stretched in time; what has a rate takes the target's; all else
        is a closed loop, for the load is what the deployment can take.
        """
        spec = self.request.scenario.workload
        rate_rps = float(self.points.rate_rps[0, row]) * load.ratio / load.num_parts
        if self._has_own_times:
            stretch = self.load.rate_rps / rate_rps if self.load.rate_rps else 1.0
            return replace(spec, time_scale=spec.time_scale * stretch)
        under_way = self.count_under_way(row, load)
        measured = self.count_measured(row, load)
        num_requests = (load.num_rounds + 1) * under_way + measured
        if self.is_loop:
            # All at once would show how a burst of them is worked off, not the steady load.
            ramp_s = f"{under_way / rate_rps:.6f}"
            return replace(
                spec,
                arrival="closed_loop",
                arrival_options={"concurrency": str(under_way), "ramp_s": ramp_s},
                num_requests=num_requests,
            )
        return replace(
            spec,
            arrival=spec.arrival if spec.arrival in _RATED else "poisson",
            arrival_options=spec.arrival_options if spec.arrival in _RATED else {},
            rate_rps=rate_rps,
            num_requests=num_requests,
        )


def _plain(
    base: ServingScenario, pool: ReplicaPool, name: str, workload: WorkloadSpec
) -> ServingScenario:
    layout = pool.layout or base.layout
    return replace(
        base,
        name=name,
        device=pool.device,
        topology=pool.topology,
        layout=replace(layout, dp=pool.num_replicas),
        engine=pool.engine or base.engine,
        quantization=pool.quantization,
        device_usd_per_hour=pool.device_usd_per_hour or base.device_usd_per_hour,
        workload=workload,
    )
