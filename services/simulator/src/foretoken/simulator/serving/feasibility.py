"""Whether a deployment can run: its layout, and the memory of every rank."""

from collections.abc import Sequence
from dataclasses import replace

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.lowering.graph import (
    BatchShape,
    DecodeShape,
    PrefillShape,
    RankContext,
    Section,
)
from foretoken.domain.lowering.lower import check_layout, lower_rank
from foretoken.domain.lowering.memory import (
    UNLIMITED_BLOCKS,
    ServingMemory,
    add_draft,
    plan_serving_memory,
)
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.latency_surfaces import engine_layout, serving_options
from foretoken.simulator.rank import stage_ranks
from foretoken.simulator.serving.draft import draft_scenario

# More than requests under way have, and little enough to be kept one by one.
_MOST_BLOCKS = 2**20


def judge_feasibility(
    scenario: ServingScenario,
    engine: EngineProfile,
    device: DeviceSpec | None = None,
    request_tokens: float = 0.0,
) -> tuple[Sequence[ServingMemory], str]:
    """Return the memory of one rank of every pipeline stage, and why it cannot run or nothing.

    `device` is one of another size than the scenario's. Requests end with `request_tokens` in the
    KV cache (0: with as many as the model takes).

    Raises:
        InvalidRequestError: the model cannot be simulated.
        UnknownDeviceError, UnknownTopologyError: no such name.

    """
    options = serving_options(scenario)
    try:
        check_layout(_ranks(scenario)[0], options)
    except InvalidRequestError as err:
        return (), err.message
    draft = draft_scenario(scenario)
    if draft is not None:
        try:
            check_layout(_ranks(draft)[0])
        except InvalidRequestError as err:
            return (), f"the draft: {err.message}"
    memories = plan_memories(scenario, engine, device, request_tokens)
    for place, memory in enumerate(memories):
        if memory.infeasibility:
            where = "" if place < scenario.layout.pp else "a device of experts: "
            return memories, where + memory.infeasibility
    if count_kv_blocks(scenario, engine, memories) == 0:
        return memories, "the memory left for the KV cache holds no block"
    return memories, ""


def count_kv_blocks(
    scenario: ServingScenario, engine: EngineProfile, memories: Sequence[ServingMemory]
) -> int:
    """Return the blocks of an engine's KV cache: as many as the fullest stage has room for.

    A model that keeps nothing of a token has room for any number, and gets `_MOST_BLOCKS`.
    """
    if scenario.engine.num_kv_blocks:
        return scenario.engine.num_kv_blocks
    least = min(memory.num_kv_blocks(engine.block_size) for memory in memories)
    return _MOST_BLOCKS if least >= UNLIMITED_BLOCKS else least


def plan_memories(
    scenario: ServingScenario,
    engine: EngineProfile,
    device: DeviceSpec | None = None,
    request_tokens: float = 0.0,
) -> list[ServingMemory]:
    """Return the memory of one rank of every pipeline stage, with its draft if it has one.

    Where experts are apart that of one of their devices comes after. The layout must fit the model,
    and the draft. `device` and `request_tokens` are as in `judge_feasibility`.
    """
    device = device or find_device(scenario.device)
    if engine.ffn_devices:
        return _plan_apart(scenario, engine, device, request_tokens)
    memories = [
        plan_serving_memory(
            _lower_largest(scenario, engine, rank), rank, engine, device, request_tokens
        )
        for rank in _ranks(scenario)
    ]
    draft = draft_scenario(scenario)
    if draft is None:
        return memories
    return [
        add_draft(memory, _plan_draft_memory(scenario, draft, engine, rank, device))
        for memory, rank in zip(memories, _ranks(draft), strict=True)
    ]


def _plan_apart(
    scenario: ServingScenario, engine: EngineProfile, device: DeviceSpec, request_tokens: float
) -> list[ServingMemory]:
    """Return the memory of a rank that attends, and of a device of experts."""
    [rank] = _ranks(scenario)
    nodes = _lower_largest(scenario, engine, rank)
    attending = tuple(n for n in nodes if not n.is_group_wide or n.group == "collective")
    experts = tuple(n for n in nodes if n.is_group_wide)
    return [
        plan_serving_memory(attending, rank, engine, device, request_tokens),
        plan_serving_memory(experts, rank, engine, device, has_attention=False),
    ]


def whole_memory(scenario: ServingScenario) -> ServingMemory:
    """Return the memory of the model on one device: what it keeps of a request counts once."""
    rules = {**scenario.engine.rules, "ffn_devices": "0", "decode_context_parallel": "1"}
    engine = replace(scenario.engine, rules=rules)
    alone = replace(scenario, layout=ParallelLayout(), engine=engine)
    [memory] = plan_memories(alone, alone.resolve_engine())
    return memory


def place_tiers(scenario: ServingScenario, kept_bytes: float) -> tuple[KvTier, ...]:
    """Return the tiers of KV blocks as the fullest rank sees them, which keeps so much of a token.

    A store that is shared has each token once, whatever ranks hold parts or copies of it.
    """
    tiers = scenario.engine.kv_tiers
    if not any(tier.is_shared for tier in tiers):
        return tiers
    whole_bytes = max(whole_memory(scenario).kv_bytes_per_token, 1.0)
    return tuple(
        replace(tier, capacity_bytes=max(int(tier.capacity_bytes * kept_bytes / whole_bytes), 1))
        for tier in tiers
    )


def _ranks(scenario: ServingScenario) -> Sequence[RankContext]:
    return stage_ranks(scenario.model, engine_layout(scenario), scenario.device, scenario.topology)


def _plan_draft_memory(
    scenario: ServingScenario,
    draft: ServingScenario,
    engine: EngineProfile,
    rank: RankContext,
    device: DeviceSpec,
) -> ServingMemory:
    """Return what a draft adds; layers of the model itself use its embeddings and its head."""
    nodes = _lower_largest(draft, engine, rank)
    if scenario.speculative is not None and scenario.speculative.draft_model is None:
        nodes = tuple(node for node in nodes if node.section is Section.LAYER)
    return plan_serving_memory(nodes, rank, engine, device)


def _lower_largest(scenario: ServingScenario, engine: EngineProfile, rank: RankContext) -> Nodes:
    """Return the operators of a rank on the largest batch the engine runs."""
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    rows_per_seq = 1 + (scenario.speculative.num_draft_tokens if scenario.speculative else 0)
    shape = BatchShape(
        num_tokens=tokens,
        num_output_rows=min(seqs * rows_per_seq, tokens),
        prefill=PrefillShape(num_seqs=1, q_tokens=tokens, kv_tokens=tokens, score_pairs=tokens),
        decode=DecodeShape(num_seqs=seqs, kv_tokens=seqs, kv_tokens_max=1),
    )
    return lower_rank(shape, serving_options(scenario), rank)
