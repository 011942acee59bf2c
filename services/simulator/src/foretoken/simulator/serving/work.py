"""The work a run needed by itself: its FLOPs and its memory traffic, by engine and stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import BatchShape, DecodeShape, PrefillShape, RankContext
from foretoken.domain.lowering.lower import lower_forward, lower_rank
from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.lowering.options import LoweringOptions, Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.quantization import find_quantization
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cluster.fleet import FleetPool
from foretoken.simulator.cost.latency_surfaces import engine_layout, quantization_of
from foretoken.simulator.model_flops import count_model_flops
from foretoken.simulator.rank import stage_ranks
from foretoken.simulator.serving.metrics import is_completed
from foretoken.simulator.serving.percentile import count_whole
from foretoken.simulator.serving.record import RequestRecord, ServingRecord, StepRecord

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


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
        for stage, (rank, memory) in enumerate(zip(ranks, memories, strict=True)):
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
    return scheme.dense.dtype or scheme.experts.dtype or scenario.dtype


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


def _batch_of(requests: RequestRecord, prompts: Bools, answers: Bools) -> BatchShape:
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
