"""What the forward pass of a micro batch leaves behind for its backward pass.

Every operator keeps what its own backward pass needs, most often its input. A tensor that two
operators need is there once. Sources: Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022, section 4; Transformer Engine 2, `pytorch/module` and
`pytorch/attention`; Megatron-Core, `transformer/moe` and `tensor_parallel/layers.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.backward import keeps_gathered_input
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.steps.held.tensor_size import written_bytes

# Roles that read what an earlier operator of the layer has saved already, the nearest first.
_SHARED_INPUTS: Mapping[str, tuple[str, ...]] = {
    "shared_up_proj": ("moe_router",),
    "moe_latent_down_proj": ("moe_router",),
    "attn_down_proj": ("attn_gate_proj",),
    "recurrent_gate_down_proj": ("recurrent_in_proj",),
    "index_key_proj": ("attn_down_proj", "attn_qkv_proj"),
    "index_query_proj": ("attn_q_proj",),
}
# What a fused gated activation keeps of its input, over what its two kernels keep apart: gate and
# up projection, against these and the activated gate.
_SEPARATE_GATE_RATIO = 1.5
_VALUES, _SOFTMAX, _DROPOUT = "attn_values", "attn_softmax", "attn_dropout"
_NORMS = ("rms_norm", "layer_norm")
_ATTENTION = ("attention_prefill", "attention_prefill_window", "mla_prefill")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """What one operator keeps, in each of `layers` (none: outside of layers, once).

    `producer` is the operator whose output it is; `num_bytes` are those of one layer.
    """

    role: str
    producer: str
    section: Section
    num_bytes: int
    layers: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes in all layers together."""
        return self.num_bytes * (len(self.layers) if self.section is Section.LAYER else 1)


def list_saved(forward: Nodes, scenario: TrainingScenario) -> tuple[SavedTensor, ...]:
    """Return what every operator of a micro batch keeps when nothing is recomputed."""
    trainer = scenario.trainer.resolve()
    return tuple(_list(forward, scenario, trainer))


def _list(
    forward: Nodes, scenario: TrainingScenario, trainer: TrainerProfile
) -> Iterator[SavedTensor]:
    roles = {node.role for node in forward}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    producer = ""
    for node in forward:
        if find_operator(node.operator).is_collective:
            continue
        layers = tuple(node.layers)
        shared = _SHARED_INPUTS.get(node.role, ())
        is_shared = any((role, layers) in seen for role in shared) or _is_repeated(
            node, roles, scenario
        )
        if node.role == _VALUES and _SOFTMAX in roles:
            yield from _value_inputs(node, roles)
            producer = node.role
            continue
        num_bytes = 0 if is_shared else _input_bytes(node, roles, scenario, trainer)
        num_bytes += _extra_bytes(node, trainer)
        seen.add((node.role, layers))
        if num_bytes:
            yield SavedTensor(
                role=node.role,
                producer=_PRODUCERS.get(node.role, producer),
                section=node.section,
                num_bytes=num_bytes,
                layers=layers,
            )
        if node.operator in _ATTENTION and _keeps_output(node, roles):
            yield SavedTensor(
                role=node.role,
                producer=node.role,
                section=node.section,
                num_bytes=int(written_bytes(node)),
                layers=layers,
            )
        producer = node.role


def _keeps_output(node: OperatorNode, roles: set[str]) -> bool:
    """Return whether attention keeps its output, since the projection keeps another tensor.

    That is what came back by an exchange, or a copy in 8 bit. Source: Transformer Engine 2,
    `pytorch/attention/dot_product_attention/backends.py` (FusedAttnFunc) and
    `pytorch/module/linear.py`.
    """
    if "_ring_" in node.role:
        return False
    return f"{node.role}_output_all_to_all" in roles or "attn_out_proj_quantize" in roles


def _value_inputs(node: OperatorNode, roles: set[str]) -> Iterator[SavedTensor]:
    """Yield what the product of probabilities and values keeps.

    Probabilities are there already, as the output that their softmax keeps, unless some are dropped
    in between.
    """
    dims = node.dims
    inputs = [("attn_qkv_proj", dims["n"] * dims["k"])]
    if _DROPOUT in roles:
        inputs.append((_DROPOUT, dims["m"] * dims["k"]))
    for producer, elements in inputs:
        yield SavedTensor(
            role=node.role,
            producer=producer,
            section=node.section,
            num_bytes=int(node.dtype.bytes_of(int(dims["batch"] * elements))),
            layers=tuple(node.layers),
        )


# Where the tensor an operator keeps comes from, if not from the operator before it. The residual
# stream comes from no operator: it is always there.
_PRODUCERS: Mapping[str, str] = {
    "input_norm": "",
    "post_attention_norm": "",
    "attn_kv_proj": "kv_latent_norm",
    "kv_latent_norm": "attn_down_proj",
    "shared_up_proj": "post_attention_norm",
    "moe_up_proj": "moe_permute",
    "moe_router": "post_attention_norm",
}


def _is_repeated(node: OperatorNode, roles: set[str], scenario: TrainingScenario) -> bool:
    """Return whether one of two parallel branches reads what the other has saved."""
    if not scenario.model.has_parallel_residual:
        return False
    if node.role == "mlp_up_proj":
        return "post_attention_norm" not in roles
    return node.role == "post_attention_norm"


def _input_bytes(
    node: OperatorNode, roles: set[str], scenario: TrainingScenario, trainer: TrainerProfile
) -> int:
    """Return the bytes of what an operator read, as it keeps that."""
    if node.operator == "cross_entropy":
        return _loss_bytes(node, trainer)
    if "_ring_" in node.role:
        # Every rank keeps its own keys and values, whoever's it has attended to.
        return 0
    elements = int(find_operator(node.operator).saved_elements(node.dims))
    if node.operator == "batched_gemm" and node.num_weights:
        # Of a product of weights by head the other factor alone is kept.
        elements -= int(node.num_weights) // node.repeat
    if f"{node.role}_input_all_gather" in roles and not keeps_gathered_input(scenario):
        # The backward pass gathers it again. Source: Megatron-LM, tensor_parallel/layers.py.
        elements //= scenario.layout.tp
    if node.operator == "silu_mul" and not trainer.fuses_bias_activation:
        elements = int(elements * _SEPARATE_GATE_RATIO)
    return int(node.dtype.bytes_of(elements))


def _loss_bytes(node: OperatorNode, trainer: TrainerProfile) -> int:
    elements = int(node.dims["num_tokens"] * node.dims["vocab"])
    dtype = node.dtype if trainer.overwrites_logits else DType.FP32
    return int(dtype.bytes_of(elements))


def _extra_bytes(node: OperatorNode, trainer: TrainerProfile) -> int:
    """Return the bytes kept besides the input: statistics and masks."""
    dims, num_bytes = node.dims, 0
    if node.operator in _NORMS:
        num_values = 2 if node.operator == "layer_norm" else 1
        num_bytes += int(DType.FP32.bytes_of(num_values * dims["num_tokens"]))
    if node.operator in _ATTENTION and "_ring_" not in node.role:
        # The logarithm of the sum of exponents of every query and head.
        num_bytes += int(DType.FP32.bytes_of(dims["q_tokens"] * dims["num_heads"]))
    if node.operator == "residual_add" and trainer.has_dropout and trainer.fuses_residual:
        # A byte for each element that may have been dropped.
        num_bytes += int(dims["num_tokens"] * dims["hidden"])
    return num_bytes
