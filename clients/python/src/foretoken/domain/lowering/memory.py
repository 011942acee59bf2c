"""What serving a model occupies on one device, and what of it no tensor can have.

Whether something fits is judged against what this leaves, for engines and trainers alike. The
memory of a device is what nvidia-smi shows in all.

An engine runs its largest batch once before it takes requests, and gives what that leaves to the
KV cache. The parts below are what that run holds at its peak, as vLLM allocates it.
Source: vLLM 0.19, `v1/worker/gpu_worker.py` (determine_available_memory) and the files named below.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.lowering.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering.lora import is_adapter_node
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import RequestState, find_kind
from foretoken.domain.models.stack import stack_of, state_of, weights_of
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import parse_variant, stored_dtype
from foretoken.domain.units import GIB, Quantity

_MIB = 2**20
# What the driver keeps of the memory that nvidia-smi shows: 0.46 GiB of an H100's, 0.47 GiB of an
# RTX 4090's, 0.59 GiB of an H200's. Source: torch.cuda.mem_get_info of each, as engines log it.
_DRIVER_BYTES = GIB // 2
# A process's CUDA context with the kernels it has loaded: 300 MB to 500 MB. Source: K. Fujii,
# memory estimator of 4D-parallel training (okoge-kaz.github.io/tools/memory-estimator).
_CONTEXT_BYTES = 500_000_000
# Buffers of an NCCL communicator of two ranks, and what one of more has in addition: 544 and 688
# MiB after its first all-reduce on A100. Source: NVIDIA/nccl, issue 964.
_PAIR_BYTES, _MORE_RANKS_BYTES = 544 * _MIB, 144 * _MIB
# Axes of a training layout whose ranks have a communicator each.
TRAINING_AXES = ("tp", "pp", "dp", "cp", "ep")


def visible_bytes(device: DeviceSpec) -> float:
    """Return the memory of a device that a process sees: all but what its driver keeps."""
    return device.memory_bytes - (_DRIVER_BYTES if device.kind == "gpu" else 0)


def context_bytes(device: DeviceSpec) -> float:
    """Return what a process takes of the visible memory before it has any tensor."""
    return float(_CONTEXT_BYTES if device.kind == "gpu" else 0)


def training_headroom_bytes(
    device: DeviceSpec, trainer: TrainerProfile, degrees: Iterable[Quantity]
) -> Quantity:
    """Return what a trainer's allocator cannot have of a device.

    There is a communicator for each axis of the layout with more than one rank; `degrees` are
    those of `TRAINING_AXES`, numbers or columns of numbers. A trainer may have its own figure.
    """
    if trainer.context_bytes or device.kind != "gpu":
        return float(trainer.context_bytes)
    outside: Quantity = device.memory_bytes - visible_bytes(device) + context_bytes(device)
    for degree in degrees:
        outside = outside + (degree > 1) * _PAIR_BYTES + (degree > 2) * _MORE_RANKS_BYTES  # noqa: PLR2004
    return outside


# Widths of the residual stream alive in a layer: two handed in, one on its way out.
_NUM_RESIDUALS = 3
# Workspace of PyTorch's matrix products. Source: PyTorch, CUDABlas workspace defaults.
_WORKSPACE_BYTES = {"hopper": 32 * 2**20, "blackwell": 32 * 2**20}
_OTHER_WORKSPACE_BYTES = 8_519_680
# More blocks than any device holds.
UNLIMITED_BLOCKS = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingMemory:
    """Bytes on one rank of a serving replica.

    `usable_bytes` is what the engine may take of the device for what its `memory_rule` counts
    (see `EngineProfile`), `reserved_bytes` what it takes besides its tensors, `graphs_bytes` what
    captured graphs take, `window_bytes` the part of the KV cache that layers with a sliding window
    need for all sequences together, `window_bytes_per_token` for each token in the window, and
    `state_bytes` what recurrent layers keep of all sequences, `state_bytes_per_request` of one.
    What is left holds blocks of `kv_bytes_per_token`. Of the `device_bytes` that a process sees its
    context takes `context_bytes`, which none of the others can have.
    `adapters_bytes` of the weights are slots of LoRA adapters, and `draft_bytes` the draft's where
    the engine speculates, whose KV cache takes `draft_kv_bytes_per_token` of a token's.
    """

    usable_bytes: float
    weights_bytes: float
    activations_bytes: float
    kv_bytes_per_token: float
    graphs_bytes: float = 0.0
    reserved_bytes: float = 0.0
    window_bytes: float = 0.0
    window_bytes_per_token: float = 0.0
    state_bytes_per_request: float = 0.0
    state_bytes: float = 0.0
    device_bytes: float = 0.0
    context_bytes: float = 0.0
    memory_rule: str = "utilization"
    adapters_bytes: float = 0.0
    draft_bytes: float = 0.0
    draft_kv_bytes_per_token: float = 0.0

    @property
    def kv_bytes(self) -> float:
        """Bytes left for the KV cache; negative when the rest does not fit."""
        held_bytes = self.weights_bytes + self.reserved_bytes
        if self.memory_rule != "static":
            held_bytes += self.activations_bytes + self.graphs_bytes
        left_bytes = self.usable_bytes - held_bytes
        if self.memory_rule == "free":
            # The share is one of what the rest of the device leaves.
            left_bytes = self.device_bytes - self.context_bytes - held_bytes
            left_bytes *= self.usable_bytes / self.device_bytes
        return left_bytes - self.window_bytes - self.state_bytes

    def num_kv_blocks(self, block_size: int) -> int:
        """Return how many blocks of `block_size` tokens fit; 0 when nothing does.

        A pipeline stage of nothing but layers with a window sets no limit: `UNLIMITED_BLOCKS`.
        """
        if self.kv_bytes_per_token == 0:
            return UNLIMITED_BLOCKS if self.kv_bytes >= 0 else 0
        return max(0, int(self.kv_bytes // (self.kv_bytes_per_token * block_size)))

    @property
    def infeasibility(self) -> str:
        """Why the rank does not fit and what would help, or nothing."""
        outside_bytes = self.device_bytes - self.context_bytes - self.usable_bytes
        if (
            self.memory_rule == "static"
            and self.device_bytes
            and self.activations_bytes + self.graphs_bytes > outside_bytes
        ):
            return (
                f"activations and graphs ({_gib(self.activations_bytes + self.graphs_bytes)}) do"
                f" not fit into the {_gib(outside_bytes)} that weights and KV cache leave;"
                f" lower memory_utilization_ratio, max_num_batched_tokens or max_num_seqs"
            )
        if self.kv_bytes > 0:
            return ""
        parts = {
            "weights": self.weights_bytes - self.adapters_bytes - self.draft_bytes,
            "LoRA adapters": self.adapters_bytes,
            "draft": self.draft_bytes,
            "activations": self.activations_bytes,
            "the engine itself": self.reserved_bytes,
            "graphs": self.graphs_bytes,
            "attention windows": self.window_bytes,
            "recurrent states": self.state_bytes,
        }
        named = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
        remedy = _REMEDIES[max(parts, key=lambda name: parts[name])]
        if self.kv_bytes + self.window_bytes + self.state_bytes > 0:
            # All else fits, however much larger it is.
            remedy = _REMEDIES["recurrent states"]
        return (
            f"a rank does not fit into the {_gib(self.usable_bytes)} the engine may use of a"
            f" device: {named}; {remedy}"
        )


_REMEDIES = {
    "weights": "spread the model over more devices (tp, pp, ep for experts) or quantize it",
    "LoRA adapters": "lower lora.max_loaded or lora.rank",
    "draft": "take a smaller speculative.draft_model or the method ngram",
    "activations": "lower max_num_batched_tokens or max_num_seqs",
    "the engine itself": "take a larger device",
    "graphs": "capture fewer graph sizes",
    "attention windows": "lower max_num_seqs",
    "recurrent states": "lower max_num_seqs",
}


def plan_serving_memory(
    nodes: Nodes,
    rank: RankContext,
    engine: EngineProfile,
    device: DeviceSpec,
    request_tokens: float = 0.0,
    *,
    has_attention: bool = True,
) -> ServingMemory:
    """Return the memory of a rank.

    `nodes` are its operators on the largest batch the engine runs, prefill and decode both.
    Requests end with `request_tokens` in the KV cache (0: with as many as the model takes); a
    device of experts alone keeps nothing of them.
    """
    device_bytes, outside_bytes = visible_bytes(device), context_bytes(device)
    model, kept = rank.model, _Kept(0.0, {}, 0.0)
    weights_bytes = sum(node.weights_bytes for node in nodes)
    if has_attention:
        kept = _kept_bytes(nodes, rank)
        weights_bytes += _rotation_bytes(nodes, model) + _extra_bytes(nodes, rank)
    adapters_bytes = sum(node.weights_bytes for node in nodes if is_adapter_node(node))
    reserved_bytes = float(engine.reserved_bytes)
    if any(_communicates(node) for node in nodes):
        reserved_bytes += engine.collective_bytes
    if engine.has_expert_balancing:
        reserved_bytes += _exchanged_expert_bytes(nodes)
    memory = ServingMemory(
        # An engine configured to take more than is free when it starts does not.
        usable_bytes=min(
            device_bytes * engine.memory_utilization_ratio, device_bytes - outside_bytes
        ),
        weights_bytes=weights_bytes,
        activations_bytes=_activations_bytes(nodes, model, engine, device),
        kv_bytes_per_token=kept.token / engine.decode_context_parallel,
        graphs_bytes=engine.graph_bytes_ratio * (weights_bytes - adapters_bytes),
        reserved_bytes=reserved_bytes,
        window_bytes_per_token=sum(kept.windows.values()),
        state_bytes_per_request=kept.request,
        device_bytes=device_bytes,
        context_bytes=outside_bytes,
        memory_rule=engine.memory_rule,
        adapters_bytes=adapters_bytes,
    )
    return _with_requests(memory, kept.windows, engine, request_tokens or model.max_position)


def _with_requests(
    memory: ServingMemory,
    windows: Mapping[int, float],
    engine: EngineProfile,
    request_tokens: float,
) -> ServingMemory:
    """Return memory with what requests hold besides all their tokens, of the room of the KV cache.

    That are the last tokens of layers with a window, given by their length, and recurrent states.
    Engines that give windows a pool of their own have a share of the other layers' tokens there. In
    one pool a request holds its window, less where it is shorter, in whole blocks, next to all its
    tokens in other layers, and prompts what a step computes of them; and its state, unless the
    engine keeps one for every request that may run. As many requests as fit have room for that, but
    a pool that has no state for each that may run is refused.
    Source: vLLM 0.19, `v1/kv_cache_interface.py` (SlidingWindowSpec, MambaSpec),
    `v1/core/kv_cache_utils.py` (groups of one page size) and `v1/worker/gpu_model_runner.py`
    (max_num_seqs exceeds available Mamba cache blocks); SGLang 0.5.9,
    `srt/model_executor/model_runner.py` (set_num_tokens_hybrid).
    """
    state, most = memory.state_bytes_per_request, engine.max_num_seqs
    each_token = memory.window_bytes_per_token
    room = max(memory.kv_bytes, 0.0)
    shares_states = engine.shares_states and most * state <= room
    if not shares_states:
        memory = replace(memory, state_bytes=most * state)
        room = max(memory.kv_bytes, 0.0)
    ratio = engine.window_tokens_ratio
    if ratio and each_token:
        share = ratio * each_token / (memory.kv_bytes_per_token + ratio * each_token)
        return replace(memory, window_bytes=room * share)
    computed = each_token * engine.max_num_batched_tokens
    window = sum(
        size * min(length + engine.block_size, request_tokens) for length, size in windows.items()
    )
    whole = window + memory.kv_bytes_per_token * request_tokens + shares_states * state
    num_requests = min(max((room - computed) / whole, 1.0), most) if whole else most
    if shares_states:
        memory = replace(memory, state_bytes=num_requests * state)
    return replace(memory, window_bytes=computed + num_requests * window)


def add_draft(memory: ServingMemory, draft: ServingMemory) -> ServingMemory:
    """Return the memory of a rank that holds both a draft and its model; they run in turn."""
    return replace(
        memory,
        weights_bytes=memory.weights_bytes + draft.weights_bytes,
        draft_bytes=draft.weights_bytes,
        activations_bytes=max(memory.activations_bytes, draft.activations_bytes),
        graphs_bytes=memory.graphs_bytes + draft.graphs_bytes,
        window_bytes=memory.window_bytes + draft.window_bytes,
        window_bytes_per_token=memory.window_bytes_per_token + draft.window_bytes_per_token,
        state_bytes=memory.state_bytes + draft.state_bytes,
        state_bytes_per_request=memory.state_bytes_per_request + draft.state_bytes_per_request,
        kv_bytes_per_token=memory.kv_bytes_per_token + draft.kv_bytes_per_token,
        draft_kv_bytes_per_token=draft.kv_bytes_per_token,
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _communicates(node: OperatorNode) -> bool:
    return find_operator(node.operator).is_collective and node.section is not Section.BOUNDARY


def _rotation_bytes(nodes: Nodes, model: ModelArchitecture) -> float:
    """Return the bytes of the sines and cosines of every position, which all layers share."""
    mixers = stack_of(model).mixers
    dim = max((find_kind(part.kind).rotary_dim(part.dims) for part in mixers), default=0)
    has_layers = any(node.section is Section.LAYER for node in nodes)
    if model.position != "rope" or not has_layers:
        return 0.0
    return float(nodes[0].written_dtype.bytes_of(model.max_position * dim))


def _activations_bytes(
    nodes: Nodes, model: ModelArchitecture, engine: EngineProfile, device: DeviceSpec
) -> float:
    """Return the peak of a run of the largest batch.

    Either a layer is the peak or the sampler after the last one. What holds the tokens of experts
    stays allocated from the first to the last (vLLM, `v1/worker/workspace.py`).
    """
    hidden_bytes = nodes[0].written_dtype.bytes_of(engine.max_num_batched_tokens * model.hidden)
    workspace = _WORKSPACE_BYTES.get(device.architecture, _OTHER_WORKSPACE_BYTES)
    in_layers = (node for node in nodes if node.section is Section.LAYER)
    # Compiled kernels are tuned on that first run, between reads that flush the cache.
    # Source: PyTorch, torch/_inductor/runtime/benchmarking.py.
    layer_bytes = _NUM_RESIDUALS * hidden_bytes + device.l2_cache_bytes + _widest(in_layers)
    if any(node.section is Section.BOUNDARY for node in nodes):
        # Buffers of what comes from and goes to other stages: hidden state and residual.
        layer_bytes += 2 * hidden_bytes
    sampler_bytes = sum(
        hidden_bytes + _sampler_bytes(node, model, engine, device)
        for node in nodes
        if node.operator == "sampler"
    )
    return float(workspace + _expert_bytes(nodes, engine) + max(layer_bytes, sampler_bytes))


def _sampler_bytes(
    node: OperatorNode, model: ModelArchitecture, engine: EngineProfile, device: DeviceSpec
) -> float:
    rows, vocab = node.dims["num_seqs"], node.dims["vocab"]
    logits_bytes = rows * vocab * engine.sampler_bytes_per_logit
    # Each block of the kernel that cuts to the top works on a row of its own, one block a
    # multiprocessor. Source: vLLM, `v1/sample/ops/topk_topp_triton.py`.
    blocks_bytes = DType.FP32.bytes_of(min(rows, device.num_sms) * vocab)
    # The hidden states of the rows are picked from all, then replaced by random ones.
    rows_bytes = 2 * node.written_dtype.bytes_of(rows * model.hidden)
    return float(logits_bytes + blocks_bytes + rows_bytes)


def _expert_bytes(nodes: Nodes, engine: EngineProfile) -> float:
    """Return the bytes of the buffers between the two products of the experts.

    An engine that computes them piece by piece needs them for a piece.
    Source: vLLM, `fused_moe/fused_moe.py` (TritonExperts.workspace_shapes). The kernels for MXFP4
    experts have none that stay.
    """
    return float(
        max(
            (
                node.written_dtype.bytes_of(
                    min(node.dims["num_tokens"], engine.expert_chunk_tokens or math.inf)
                    * node.dims["top_k"]
                    * (
                        max(node.dims["intermediate"], node.dims["hidden"])
                        + max(2 * node.dims["intermediate"], node.dims["hidden"])
                    )
                )
                for node in nodes
                if node.is_experts and "mxfp4" not in node.variant
            ),
            default=0,
        )
    )


def _exchanged_expert_bytes(nodes: Nodes) -> float:
    """Return what a load balancer receives the experts of a rank in, a layer at a time.

    Source: vLLM, `distributed/eplb/eplb_state.py` (EplbModelState.expert_buffer).
    """
    experts = (node for node in nodes if node.operator == "moe_local_experts")
    return max((node.weights_bytes / node.repeat for node in experts), default=0.0)


def _widest(nodes: Iterable[OperatorNode]) -> float:
    """Return the bytes of the largest inputs and outputs of an elementwise operator.

    What a matrix product reads is gone when the operator after it runs, and is never wider.
    """
    return max(
        (
            float(find_operator(node.operator).moved_bytes(node.dims, node.written_dtype.num_bytes))
            for node in nodes
            if node.operator in ("silu_mul", "gelu")
        ),
        default=0.0,
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes that a rank keeps: of each token, of each in a window by its length, of a request."""

    token: float
    windows: Mapping[int, float]
    request: float


def _kept_bytes(nodes: Nodes, rank: RankContext) -> _Kept:
    """Return what the layers of a rank keep of a request.

    Where no layer of the model keeps all tokens, those with a window count as if they did: tokens
    that have left every window are not freed here.
    """
    stack, dtype = stack_of(rank.model), _kv_dtype(nodes)
    held = {layer for node in nodes for layer in node.layers}
    sees_all = any(_keeps_all(state_of(part)) for part in stack.mixers)
    token = request = 0.0
    windows: dict[int, float] = {}
    for part, layers in stack.mixers.items():
        count, state = len(held.intersection(layers)), state_of(part, rank.layout.tp)
        if not count:
            continue
        token += float(dtype.bytes_of(state.token_elements * count)) + state.token_bytes * count
        window = float(dtype.bytes_of(state.window_elements * count))
        if window and sees_all:
            windows[state.window_tokens] = windows.get(state.window_tokens, 0.0) + window
        else:
            token += window
        request += state.request_bytes * count
    return _Kept(token, windows, request)


def _keeps_all(state: RequestState) -> bool:
    return bool(state.token_elements or state.token_bytes)


def _kv_dtype(nodes: Nodes) -> DType:
    """Return the format of the KV cache: the operators that use it say it if it is their own."""
    schemes = (parse_variant(node.variant).get("kv", "") for node in nodes)
    found = next((stored_dtype(scheme) for scheme in schemes if scheme), None)
    return found or nodes[0].written_dtype


def _extra_bytes(nodes: Nodes, rank: RankContext) -> float:
    """Return the weights outside the layers that no operator here has, on a rank with embeddings.

    Engines split encoders over tp as they split layers.
    """
    if not any(node.section is Section.EMBEDDING for node in nodes):
        return 0.0
    kinds = ((part, find_kind(part.kind)) for part in stack_of(rank.model).extras)
    held = [part for part, kind in kinds if kind.around is None and kind.lower is None]
    counts = (weights.total for part in held for weights in weights_of(part, rank.model))
    return float(nodes[0].written_dtype.bytes_of(sum(counts))) / rank.layout.tp
