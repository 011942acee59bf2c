"""The work a run needed by itself: its FLOPs and its memory traffic, by engine and stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.estimate import DType
from foretoken.domain.graph import BatchShape, DecodeShape, PrefillShape
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering import LoweringOptions, Nodes, lower_forward, lower_rank
from foretoken.domain.memory import ServingMemory
from foretoken.domain.quantization import find_quantization
from foretoken.domain.scenario import ServingScenario
from foretoken.simulator.latency_surfaces import engine_layout
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
    `bytes_s`, both [engine, stage].
    """

    flops_s: Floats
    bytes_s: Floats


def measure_work(
    scenario: ServingScenario, record: ServingRecord, memories: Sequence[ServingMemory]
) -> NecessaryWork:
    """Return the work of a run; `memories` are of one device of each stage.

    FLOPs are those of completed requests once: nothing computed again counts, and what the prefix
    cache held was not computed. Bytes are a step's weights once, of experts those hit, and the KV
    cache its attention reads.
    """
    device = find_device(scenario.device)
    layout = scenario.layout
    options = _options(scenario)
    ranks = stage_ranks(scenario.model, engine_layout(scenario), scenario.device, scenario.topology)
    probe = BatchShape(num_tokens=1024, num_output_rows=1)
    shares = np.array([count_model_flops(lower_rank(probe, options, rank)) for rank in ranks])
    peak = device.peak_flops(compute_dtype(scenario)) * layout.num_devices / (layout.dp * layout.pp)
    flops = np.array(
        [
            _model_flops(scenario, record.requests, np.asarray(record.requests.engine) == engine)
            for engine in range(len(record.steps))
        ]
    )
    bytes_ = np.zeros((len(record.steps), len(ranks)))
    for engine, steps in enumerate(record.steps):
        tokens, counts = count_whole(steps.num_tokens)
        shape = BatchShape(num_tokens=tokens, num_output_rows=tokens)
        for stage, (rank, memory) in enumerate(zip(ranks, memories, strict=True)):
            weights = _weights_read(lower_rank(shape, options, rank), len(tokens))
            kv_bytes = _kv_tokens_read(steps) * memory.kv_bytes_per_token
            bytes_[engine, stage] = weights @ counts + kv_bytes
    return NecessaryWork(
        flops_s=flops[:, None] * (shares / shares.sum()) / peak,
        bytes_s=bytes_ / device.memory_bandwidth_bytes_per_s,
    )


def compute_dtype(scenario: ServingScenario) -> DType:
    """Return the format most matrices are multiplied in; weight-only ones multiply as `dtype`.

    Raises:
        UnknownPluginError: no such quantisation.

    """
    scheme = find_quantization(scenario.quantization)
    return scheme.dense.dtype or scheme.experts.dtype or scenario.dtype


def _model_flops(scenario: ServingScenario, requests: RequestRecord, chosen: Bools) -> float:
    """Return the FLOPs that the chosen requests need once, if they completed.

    FLOPs are linear in these sums, so one batch of everything has those of all steps.
    """
    done = chosen & is_completed(requests)
    if not done.any():
        return 0.0
    prompts, answers, cached = (
        np.asarray(column, dtype=np.int64)[done]
        for column in (
            requests.num_prefill_tokens,
            requests.num_decode_tokens,
            requests.num_cached_tokens,
        )
    )
    # A preempted request finds its own blocks again, so its hits may exceed its prompt.
    cached = np.minimum(cached, prompts - 1)
    new = prompts - cached
    num_decodes = int((answers - 1).sum())
    kv_tokens = int(((answers - 1) * prompts + answers * (answers - 1) // 2).sum())
    shape = BatchShape(
        num_tokens=int(new.sum()) + num_decodes,
        num_output_rows=int(answers.sum()),
        prefill=PrefillShape(
            num_seqs=int(done.sum()),
            q_tokens=int(new.sum()),
            kv_tokens=int(prompts.sum()),
            score_pairs=int((new * cached + new * (new + 1) // 2).sum()),
        ),
        decode=DecodeShape(num_seqs=num_decodes, kv_tokens=kv_tokens, kv_tokens_max=kv_tokens)
        if num_decodes
        else None,
    )
    return count_model_flops(lower_forward(scenario.model, shape, _options(scenario)))


def _options(scenario: ServingScenario) -> LoweringOptions:
    # One operator for a whole module of latent attention would hide its projections' weights.
    return LoweringOptions(
        dtype=scenario.dtype,
        has_kv_cache=True,
        quantization=scenario.quantization,
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
