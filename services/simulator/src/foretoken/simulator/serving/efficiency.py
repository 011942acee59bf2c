"""The work a run needed, how much of the devices it used, and its energy and money."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import BatchShape, DecodeShape, PrefillShape, RankContext
from foretoken.domain.lowering.lower import lower_forward, lower_rank
from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.lowering.options import LoweringOptions, Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.metrics.serving import RunTotals, rates_of
from foretoken.domain.models.quantization import find_quantization
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import (
    EngineReport,
    ServingReport,
    ServingStageMemory,
    StageReport,
)
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.cluster.fleet import FleetPool
from foretoken.simulator.cluster.fleet_run import (
    FleetRun,
    mean_of,
    mean_use,
    pool_report,
)
from foretoken.simulator.cost.latency_surfaces import engine_layout, quantization_of
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.model_flops import count_model_flops
from foretoken.simulator.rank import stage_ranks
from foretoken.simulator.serving.metrics import count_whole, is_completed
from foretoken.simulator.serving.occupancy import held_ns
from foretoken.simulator.serving.record import RequestRecord, ServingRecord, StepRecord
from foretoken.simulator.serving.step_cost import StepAccount


@dataclass(frozen=True, kw_only=True, slots=True)
class NecessaryWork:
    """What completed requests needed, per engine and pipeline stage, over what a second offers.

    In seconds of the stage's devices at their peak: of FLOP/s in `flops_s`, of memory bandwidth in
    `bytes_s`, both by engine, then [stage].
    """

    flops_s: Sequence[Floats]
    bytes_s: Sequence[Floats]


def measure_work(
    record: ServingRecord,
    fleet: Sequence[FleetPool],
    memories: Sequence[Sequence[ServingMemory]],
) -> NecessaryWork:
    """Return the work of a run; `memories` are of one device of each stage, by pool.

    FLOPs are those of completed requests once: nothing computed again counts, and what the prefix
    cache held was not computed. Bytes are a step's weights once, of experts those hit, and the KV
    cache its attention reads.
    """
    flops_s: list[Floats] = []
    bytes_s: list[Floats] = []
    for pool, stages in zip(fleet, memories, strict=True):
        flops_s += _flops_s(pool, record.requests)
        bytes_s += _bytes_s(pool, record.steps, stages)
    return NecessaryWork(flops_s=flops_s, bytes_s=bytes_s)


def _flops_s(pool: FleetPool, requests: RequestRecord) -> list[Floats]:
    """Return the time of each engine's FLOPs at the peak of its stages."""
    scenario = pool.scenario
    probe = BatchShape(num_tokens=1024, num_output_rows=1)
    options = _options(scenario)
    shares = np.array(
        [count_model_flops(lower_rank(probe, options, rank)) for rank in _ranks(scenario)]
    )
    device = find_device(scenario.device)
    peak = device.peak_flops(compute_dtype(scenario)) * pool.num_devices / pool.num_stages
    return [
        _engine_flops(scenario, requests, engine) * (shares / shares.sum()) / peak
        for engine in pool.engines
    ]


def _bytes_s(
    pool: FleetPool, all_steps: Sequence[StepRecord], memories: Sequence[ServingMemory]
) -> list[Floats]:
    """Return the time of each engine's reads at the bandwidth of its stages."""
    options, ranks = _options(pool.scenario), _ranks(pool.scenario)
    bandwidth = find_device(pool.scenario.device).memory_bandwidth_bytes_per_s
    found = []
    for steps in (all_steps[engine] for engine in pool.engines):
        tokens, counts = count_whole(steps.num_tokens)
        shape = BatchShape(num_tokens=tokens, num_output_rows=tokens)
        bytes_ = np.zeros(len(ranks))
        for stage, (rank, memory) in enumerate(zip(ranks, memories[: len(ranks)], strict=True)):
            if len(tokens):
                read = _weights_read(lower_rank(shape, options, rank), len(tokens))
                bytes_[stage] = read @ counts
            bytes_[stage] += _kv_tokens_read(steps) * (
                memory.kv_bytes_per_token - memory.draft_kv_bytes_per_token
            )
        found.append(bytes_ / bandwidth)
    return found


def _ranks(scenario: ServingScenario) -> Sequence[RankContext]:
    return stage_ranks(scenario.model, engine_layout(scenario), scenario.device, scenario.topology)


def compute_dtype(scenario: ServingScenario) -> DType:
    """Return the format most matrices are multiplied in; weight-only ones multiply as `dtype`.

    Raises:
        UnknownPluginError: no such quantisation.
        InvalidRequestError: the device cannot run it, nor the engine emulate it.

    """
    scheme = find_quantization(quantization_of(scenario).name)
    return next(iter(scheme.dtypes), scenario.dtype)


def _engine_flops(scenario: ServingScenario, requests: RequestRecord, engine: int) -> float:
    """Return the FLOPs that completed requests need once of an engine.

    Prompts and answers are apart where another engine computed the prompt.
    """
    done = is_completed(requests)
    answers = done & (np.asarray(requests.engine) == engine)
    prompts = answers
    if requests.prefill_engine is not None:
        elsewhere = np.asarray(requests.prefill_engine)
        prompts = done & (np.where(elsewhere < 0, requests.engine, elsewhere) == engine)
    shape = _batch_of(requests, prompts, answers)
    if shape.num_tokens == 0:
        return 0.0
    return count_model_flops(lower_forward(scenario.model, shape, _options(scenario)))


def _batch_of(requests: RequestRecord, prompts: Flags, answers: Flags) -> BatchShape:
    """Return one batch of some requests' prompts, and of some requests' answers after the first.

    FLOPs are linear in these sums, so it has those of all steps.
    """
    num_prompt, num_answer, num_cached = (
        np.asarray(column, dtype=np.int64)
        for column in (
            requests.num_prefill_tokens,
            requests.num_decode_tokens,
            requests.num_cached_tokens,
        )
    )
    # A preempted request finds its own blocks again, so its hits may exceed its prompt.
    cached = np.minimum(num_cached, num_prompt - 1)[prompts]
    new = num_prompt[prompts] - cached
    contexts, gaps = num_prompt[answers], num_answer[answers] - 1
    num_decodes = int(gaps.sum())
    kv_tokens = int((gaps * contexts + (gaps + 1) * gaps // 2).sum())
    return BatchShape(
        num_tokens=int(new.sum()) + num_decodes,
        num_output_rows=int(prompts.sum()) + num_decodes,
        prefill=PrefillShape(
            num_seqs=int(prompts.sum()),
            q_tokens=int(new.sum()),
            kv_tokens=int(num_prompt[prompts].sum()),
            score_pairs=int((new * cached + new * (new + 1) // 2).sum()),
        )
        if prompts.any()
        else None,
        decode=DecodeShape(num_seqs=num_decodes, kv_tokens=kv_tokens, kv_tokens_max=kv_tokens)
        if num_decodes
        else None,
    )


def _options(scenario: ServingScenario) -> LoweringOptions:
    # One operator for a whole module of latent attention would hide its projections' weights.
    return LoweringOptions(
        dtype=scenario.dtype,
        has_kv_cache=True,
        quantization=quantization_of(scenario).name,
        kv_dtype=scenario.kv_dtype,
        mla_form="operators",
    )


def _weights_read(nodes: Nodes, num_shapes: int) -> Floats:
    """Return the bytes of weights a step of a rank reads, for each of the nodes' shapes."""
    read = np.zeros(num_shapes)
    for node in nodes:
        # A table of embeddings is not read whole; a head that shares it reads it.
        if node.operator == "embedding":
            continue
        hit_ratio = 1.0
        if "num_active_experts" in node.dims:
            held = node.dims.get("num_local_experts", node.dims["num_experts"])
            hit_ratio = node.dims["num_active_experts"] / held
        read += replace(node, shares_weights=False).weights_bytes * hit_ratio
    return read


def _kv_tokens_read(steps: StepRecord) -> float:
    prefills = np.sum(steps.prefill_context) + np.sum(steps.prefill_tokens)
    return float(np.sum(steps.decode_kv_tokens) + prefills)


_PRICES = (
    *("energy_wh", "energy_j_per_output_token", "power_w_mean"),
    *("usd_per_million_output_tokens", "usd_per_million_tokens"),
)


def add_step_time(report: ServingReport, accounts: Sequence[StepAccount]) -> ServingReport:
    """Return the report with where the busy time went, what it rests on and how sure it is."""
    busy_s = sum(account.busy_s for account in accounts)
    if busy_s == 0:
        return report
    return replace(
        report,
        step_time_s_by_group=_sum_by_key([account.time_s_by_group for account in accounts]),
        step_time_ratio_by_provenance={
            name: time_s / busy_s
            for name, time_s in _sum_by_key([a.time_s_by_provenance for a in accounts]).items()
        },
        step_time_low_ratio=sum(account.low_s for account in accounts) / busy_s,
        step_time_high_ratio=sum(account.high_s for account in accounts) / busy_s,
    )


def add_use(
    report: ServingReport,
    run: FleetRun,
    accounts: Sequence[StepAccount],
    memories: Sequence[Sequence[ServingMemory]],
) -> ServingReport:
    """Return the report with the use of devices and KV cache; its duration must be known.

    `memories` are of one device of each stage, by pool. Means over engines weigh each by what it
    held for how long.
    """
    work = measure_work(run.record, run.fleet, memories)
    engines = tuple(
        _engine_report(run, pool, accounts[engine], work, engine)
        for pool in run.fleet
        for engine in pool.engines
    )
    if not engines:
        return report
    pools = tuple(pool_report(run, pool, engines) for pool in run.fleet)
    pools += (run.encoders,) if run.encoders else ()
    block_s = [
        run.held_s(pool, engine) * max(pool.record.num_kv_blocks, 1)
        for pool in run.fleet
        for engine in pool.engines
    ]
    use: dict[str, Any] = {**mean_use(run, run.fleet, engines)}
    return replace(
        report,
        engines=engines,
        pools=pools if run.record.pools else (),
        **use,
        kv_utilization_ratio_mean=mean_of([e.kv_utilization_ratio_mean for e in engines], block_s),
        kv_utilization_ratio_max=max(e.kv_utilization_ratio_max for e in engines),
    )


def add_prices(report: ServingReport, run: FleetRun, totals: RunTotals) -> ServingReport:
    """Return the report with energy and cost, where the scenario gives power and price.

    A device takes `device_busy_w` while its stage is busy and `device_idle_w` for the rest of the
    time that it is held, which is what it costs.
    """
    energy_j = sum(
        run.device_s(pool) * _power_w(pool.scenario, busy_ratio)
        for pool, busy_ratio in zip(run.fleet, _busy_ratios(report, run), strict=True)
    )
    cost_usd = sum(run.cost_usd(pool) for pool in run.fleet)
    if run.encoder is not None and run.encoders is not None:
        power_w = _power_w(run.encoder, run.encoders.utilization_ratio)
        energy_j += run.encoders.device_s * power_w
        cost_usd += run.encoders.cost_usd
    totals = replace(totals, energy_j=energy_j, cost_usd=cost_usd)
    return replace(report, cost_usd=cost_usd, **rates_of(totals, *_PRICES))


def describe_memory(
    fleet: Sequence[FleetPool], memories: Sequence[Sequence[ServingMemory]]
) -> tuple[ServingStageMemory, ...]:
    """Return what occupies a device of each stage; the KV cache is the one the run had.

    A device of experts alone is one of a pool of their own.
    """
    return tuple(
        ServingStageMemory(
            stage=stage % pool.num_stages,
            device_bytes=memory.device_bytes,
            usable_bytes=memory.usable_bytes,
            weights_bytes=memory.weights_bytes,
            activations_bytes=memory.activations_bytes,
            graphs_bytes=memory.graphs_bytes,
            reserved_bytes=memory.reserved_bytes,
            kv_bytes=memory.kv_bytes_per_token * pool.record.num_kv_blocks * pool.record.block_size
            + memory.window_bytes
            + memory.state_bytes,
            pool=f"{pool.record.name} experts".strip()
            if stage >= pool.num_stages
            else pool.record.name,
        )
        for pool, stages in zip(fleet, memories, strict=True)
        for stage, memory in enumerate(stages)
    )


def _busy_ratios(report: ServingReport, run: FleetRun) -> Sequence[float]:
    if report.pools:
        return [pool.utilization_ratio for pool in report.pools if pool.role != "encoder"]
    return [report.utilization_ratio] * len(run.fleet)


def _power_w(scenario: ServingScenario, busy_ratio: float) -> float:
    """Return the power of a device that is busy for a share of the time, in W."""
    idle_w, busy_w = scenario.device_idle_w, scenario.busy_power_w
    return idle_w + (busy_w - idle_w) * busy_ratio


def _engine_report(
    run: FleetRun, pool: FleetPool, account: StepAccount, work: NecessaryWork, engine: int
) -> EngineReport:
    steps = run.record.steps[engine]
    held_s = run.held_s(pool, engine)
    num_blocks = max(pool.record.num_kv_blocks, 1)
    used = np.asarray(steps.num_used_blocks)
    block_s = float(used @ held_ns(steps)) / NS_PER_S
    report = EngineReport(
        engine=engine,
        num_requests=int(run.is_on([engine]).sum()),
        num_serving_steps=len(used),
        num_preemptions=run.count_preemptions(engine),
        kv_utilization_ratio_mean=_share(block_s, held_s * num_blocks),
        kv_utilization_ratio_max=float(used.max(initial=0)) / num_blocks,
        stages=tuple(
            StageReport(
                stage=stage,
                utilization_ratio=_share(account.stage_busy_s[stage], held_s),
                mfu_ratio=_share(float(flops_s), held_s),
                mbu_ratio=_share(float(bytes_s), held_s),
            )
            for stage, (flops_s, bytes_s) in enumerate(
                zip(work.flops_s[engine], work.bytes_s[engine], strict=True)
            )
        ),
    )
    if not run.record.pools:
        return report
    phases = run.phases_of(pool, engine)
    return replace(
        report,
        pool=pool.record.name,
        num_failures=sum(phase.state == "restarting" for phase in phases),
        running_s=sum(p.end_s - p.start_s for p in phases if p.state == "running"),
        phases=phases,
    )


def _share(used: float, held: float) -> float:
    return used / held if held else 0.0


def _sum_by_key(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
