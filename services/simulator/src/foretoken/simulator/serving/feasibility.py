"""Whether a deployment can run: its layout, and the memory of every rank."""

from collections.abc import Sequence

from foretoken.domain.engine import EngineProfile
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.graph import BatchShape, DecodeShape, PrefillShape, RankContext
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering import check_layout, lower_rank
from foretoken.domain.memory import ServingMemory, plan_serving_memory
from foretoken.domain.scenario import ServingScenario
from foretoken.simulator.latency_surfaces import engine_layout, serving_options
from foretoken.simulator.rank import stage_ranks


def judge_feasibility(
    scenario: ServingScenario, engine: EngineProfile
) -> tuple[Sequence[ServingMemory], str]:
    """Return the memory of one rank of every pipeline stage, and why it cannot run or nothing.

    Raises:
        InvalidRequestError: the model cannot be simulated.
        UnknownDeviceError, UnknownTopologyError: no such name.

    """
    ranks = stage_ranks(scenario.model, engine_layout(scenario), scenario.device, scenario.topology)
    try:
        check_layout(ranks[0])
    except InvalidRequestError as err:
        return (), err.message
    memories = [_plan_memory(scenario, engine, rank) for rank in ranks]
    for memory in memories:
        if memory.infeasibility:
            return memories, memory.infeasibility
    if count_kv_blocks(scenario, engine, memories) == 0:
        return memories, "the memory left for the KV cache holds no block"
    return memories, ""


def count_kv_blocks(
    scenario: ServingScenario, engine: EngineProfile, memories: Sequence[ServingMemory]
) -> int:
    """Return the blocks of an engine's KV cache: as many as the fullest stage has room for."""
    if scenario.engine.num_kv_blocks:
        return scenario.engine.num_kv_blocks
    return min(memory.num_kv_blocks(engine.block_size) for memory in memories)


def _plan_memory(
    scenario: ServingScenario, engine: EngineProfile, rank: RankContext
) -> ServingMemory:
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    shape = BatchShape(
        num_tokens=tokens,
        num_output_rows=min(seqs, tokens),
        prefill=PrefillShape(num_seqs=1, q_tokens=tokens, kv_tokens=tokens, score_pairs=tokens),
        decode=DecodeShape(num_seqs=seqs, kv_tokens=seqs, kv_tokens_max=1),
    )
    nodes = lower_rank(shape, serving_options(scenario), rank)
    return plan_serving_memory(nodes, scenario.model, engine, find_device(scenario.device))
