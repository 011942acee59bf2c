"""The operators of one whole step as `transformers` runs it on one device.

On top of the rules of the trainer profile `transformers`: projections of queries, keys and values,
and of gate and up, are products of their own in most model types, whose input gradients are then
added up; and some activations are chains of operators.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from foretoken.domain.frameworks.trainer import TrainerProfile, find_trainer
from foretoken.domain.lowering.graph import (
    BatchShape,
    DecodeShape,
    OperatorNode,
    PrefillShape,
    Section,
)
from foretoken.domain.lowering.lower import lower_backward, lower_forward
from foretoken.domain.lowering.node_builder import as_chain
from foretoken.domain.lowering.options import (
    LoweringOptions,
    Nodes,
    TrainingOptions,
)
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator

TRAINER = "transformers"

# Model types whose projections lie in one matrix. Source: their modeling files in transformers.
_ONE_QKV = ("gpt2", "gpt_neox", "phi3")
_ONE_GATE_UP = ("phi3",)
# Activations that are chains. Source: transformers, activations.py (NewGELUActivation).
_CHAIN_ACTIVATIONS = ("gelu_new",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelForm:
    """What decides which operators `transformers` runs, besides the architecture.

    A `compiled` model has its chains and its additions fused by the compiler.
    """

    model_type: str = "llama"
    activation: str = ""
    is_compiled: bool = False

    @property
    def trainer(self) -> TrainerProfile:
        """The rules of the framework."""
        profile = find_trainer(TRAINER)
        if not self.is_compiled:
            return profile
        return replace(
            profile, fuses_norm=True, fuses_rope=True, fuses_gate=True, casts_logits=False
        )

    @property
    def chain_roles(self) -> tuple[str, ...]:
        """What runs as a chain of operators, in addition to the trainer's own."""
        if self.is_compiled:
            return ()
        has_chain = self.activation in _CHAIN_ACTIVATIONS
        return ("q_norm", "k_norm", *(("mlp_activation",) if has_chain else ()))


def lower_step(step: ClosureStep, model: ModelArchitecture, dtype: DType, form: ModelForm) -> Nodes:
    """Return the operators of a step, an optimizer's update at the end of training."""
    options = LoweringOptions(
        dtype=dtype,
        has_kv_cache=step.kind != "training",
        has_loss=step.kind == "training",
        mla_form="operators",
        training=TrainingOptions(
            trainer=form.trainer,
            micro_batch_size=step.batch_size,
            sequence_length=step.num_tokens,
        ),
    )
    forward = tuple(
        part
        for node in lower_forward(model, _shape_of(step), options)
        for part in _as_run(node, model, form)
    )
    if step.kind != "training":
        return forward
    backward = tuple(_gradients(lower_backward(forward, options), model))
    return (*forward, *backward, _update(forward, dtype))


def _shape_of(step: ClosureStep) -> BatchShape:
    if step.kind == "decode":
        length = step.num_tokens + 1
        return BatchShape(
            num_tokens=step.batch_size,
            num_output_rows=step.batch_size,
            decode=DecodeShape(
                num_seqs=step.batch_size,
                kv_tokens=step.batch_size * length,
                kv_tokens_max=length,
            ),
        )
    num_tokens = step.batch_size * step.num_tokens
    return BatchShape(
        num_tokens=num_tokens,
        num_output_rows=num_tokens if step.kind == "training" else step.batch_size,
        prefill=PrefillShape(**prefill_dims(step.batch_size, step.num_tokens, 0)),
    )


def _as_run(
    node: OperatorNode, model: ModelArchitecture, form: ModelForm
) -> Iterator[OperatorNode]:
    """Yield the operators that stand for one of the lowering's."""
    q_width = model.num_heads * model.head_dim
    kv_width = model.num_kv_heads * model.head_dim
    if node.role == "attn_qkv_proj" and form.model_type not in _ONE_QKV:
        for part, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            yield _product(node, f"attn_{part}_proj", width)
    elif node.role == "mlp_up_proj" and model.is_gated and form.model_type not in _ONE_GATE_UP:
        for part in ("gate", "up"):
            yield _product(node, f"mlp_{part}_proj", model.intermediate)
    elif node.role in form.chain_roles:
        yield as_chain(node)
    elif node.role != "logits_cast":
        # The conversion of logits is part of the loss as it is measured.
        yield node


def _product(node: OperatorNode, role: str, width: int) -> OperatorNode:
    return replace(node, role=role, dims={**node.dims, "n": width})


def _gradients(nodes: Sequence[OperatorNode], model: ModelArchitecture) -> Iterator[OperatorNode]:
    """Yield the backward operators, with the sums and copies that autograd adds."""
    kv_width = model.num_kv_heads * model.head_dim
    for node in nodes:
        if node.role == "embedding_accumulate":
            # The first gradient of a step is kept as it is; a tied table gets two.
            if model.has_tied_embedding:
                yield node
            continue
        if node.role.endswith("_accumulate"):
            continue
        if node.role in ("attn_k_proj_dgrad", "attn_v_proj_dgrad"):
            # Gradients of heads are laid out as tokens again.
            yield _rows_like(node, f"{node.role}_copy", "copy", kv_width)
        yield node
        if node.role in ("attn_k_proj_dgrad", "attn_q_proj_dgrad", "mlp_gate_proj_dgrad"):
            # Products of one input: their gradients of it are added up.
            yield _rows_like(node, f"{node.role}_sum", "residual_add", model.hidden)
        if node.role == "attn_qkv_proj_dgrad":
            width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
            yield _rows_like(node, "attn_qkv_concat", "copy", width)


def _rows_like(node: OperatorNode, role: str, operator: str, width: int) -> OperatorNode:
    return replace(
        node,
        role=role,
        group=find_operator(operator).group,
        operator=operator,
        dims={"num_tokens": node.dims["m"], "hidden": width},
        phase=Phase.FORWARD,
        share=1.0,
        variant="",
        has_bias=False,
    )


def _update(forward: Sequence[OperatorNode], dtype: DType) -> OperatorNode:
    weights = [node for node in forward if node.num_weights]
    num_tensors = sum(node.repeat * (1 + node.has_bias) for node in weights)
    # A layer norm has a bias as well as a weight.
    num_tensors += sum(node.repeat for node in weights if node.operator == "layer_norm")
    return OperatorNode(
        role="optimizer_update",
        group=find_operator("fused_adam").group,
        section=Section.OPTIMIZER,
        operator="fused_adam",
        dims={
            "num_params": int(sum(node.num_weights for node in weights)),
            "num_tensors": num_tensors,
        },
        dtype=dtype,
    )
