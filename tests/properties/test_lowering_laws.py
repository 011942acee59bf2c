"""Laws of lowering: what cutting a model must not change."""

import dataclasses
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EXPERT_EXCHANGES
from foretoken.domain.lowering.communication import group_dims
from foretoken.domain.lowering.graph import (
    BatchShape,
    DecodeShape,
    OperatorNode,
    PrefillShape,
    RankContext,
    Section,
)
from foretoken.domain.lowering.lower import (
    check_layout,
    lower_backward,
    lower_forward,
    lower_rank,
)
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, all_models
from foretoken.domain.models.kinds.spec.kind import find_kind
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.models.quantization import all_quantizations
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout

_OPTIONS = LoweringOptions(dtype=DType.BF16, has_loss=True)
_DENSE = sorted(
    (
        model
        for model in all_models().values()
        if model.moe is None
        and model.mla is None
        and not model.layers
        # Heads that draft are held whole by every rank.
        and all(part.kind != "draft_inputs" for part in model.extras)
    ),
    key=lambda model: model.name,
)
_models = st.sampled_from(_DENSE)
_lengths = st.integers(1, 4096)
_degrees = st.integers(1, 8)


def _batch(length: int) -> BatchShape:
    prefill = PrefillShape(**prefill_dims(1, length, 0))
    return BatchShape(num_tokens=length, num_output_rows=length, prefill=prefill)


def _ranks(model: ModelArchitecture, layout: ParallelLayout) -> list[RankContext]:
    return [
        RankContext(model=model, layout=layout, devices_per_node=8, stage=stage)
        for stage in range(layout.pp)
    ]


def _tp_degrees(model: ModelArchitecture) -> list[int]:
    """Degrees that cut the model without repeating a head or padding the vocabulary."""
    sizes = (model.num_heads, model.num_kv_heads, model.intermediate, model.vocab)
    return [tp for tp in (1, 2, 4, 8) if all(size % tp == 0 for size in sizes)]


def _weights(nodes: Iterable[OperatorNode], *, replicated: bool) -> int:
    """Weights of norms and position embeddings, which every rank repeats, or of all else."""
    return sum(
        int(node.num_weights)
        for node in nodes
        if (node.role == "position_embedding" or "norm" in node.operator) == replicated
    )


def _flops(nodes: Iterable[OperatorNode], *operators: str) -> int:
    return sum(
        find_operator(node.operator).flops(node.dims, 2.0) * node.repeat
        for node in nodes
        if node.operator in operators
    )


def test_lowered_weights_are_the_models_parameters() -> None:
    """Biases and a second norm of parallel branches are not lowered: under 0.2 %.

    Text runs no encoder of images.
    """
    for model in _DENSE:
        lowered = sum(int(n.num_weights) for n in lower_forward(model, _batch(1), _OPTIONS))
        count = count_parameters(model)
        encoders = sum(part.total for part in count.parts if part.part.kind == "encoder")
        total = count.total - encoders
        assert abs(lowered / total - 1) < 2e-3, (model.name, lowered, total)


@given(_models, _lengths, st.integers(1, 4), st.integers(1, 4))
def test_without_tensor_parallelism_there_is_no_collective(
    model: ModelArchitecture, length: int, pp: int, dp: int
) -> None:
    """Data parallelism acts once a step, outside of this graph; stages only send."""
    for rank in _ranks(model, ParallelLayout(pp=pp, dp=dp)):
        nodes = lower_rank(_batch(length), _OPTIONS, rank)
        found = [n.operator for n in nodes if find_operator(n.operator).is_collective]
        assert (["send_recv"] if rank.stage < pp - 1 else []) == found


@given(st.data(), _models, _lengths)
def test_tensor_parallelism_conserves_flops_and_weights(
    data: st.DataObject, model: ModelArchitecture, length: int
) -> None:
    tp = data.draw(st.sampled_from(_tp_degrees(model)))
    whole = lower_forward(model, _batch(length), _OPTIONS)
    (rank,) = _ranks(model, ParallelLayout(tp=tp))
    part = lower_rank(_batch(length), _OPTIONS, rank)
    for operator in ("gemm", "attention_prefill"):
        assert _flops(whole, operator) == tp * _flops(part, operator)
    assert _weights(whole, replicated=False) == tp * _weights(part, replicated=False)
    assert _weights(whole, replicated=True) == _weights(part, replicated=True)


@given(_models, _lengths, _degrees)
def test_stages_together_hold_every_layer_once(
    model: ModelArchitecture, length: int, pp: int
) -> None:
    ranks = _ranks(model, ParallelLayout(pp=pp))
    stages = [lower_rank(_batch(length), _OPTIONS, rank) for rank in ranks]
    layers = [layer for rank in ranks for layer in rank.stage_layers]
    assert list(range(model.num_layers)) == layers
    for node in lower_forward(model, _batch(length), _OPTIONS):
        parts = [n for stage in stages for n in stage if n.role == node.role]
        assert node.repeat == sum(part.repeat for part in parts)
        covered = [i for n in parts for i in range(n.first_layer, n.first_layer + n.repeat)]
        if node.section is Section.LAYER:
            assert layers == covered


@given(_models, _degrees)
def test_stages_together_hold_every_weight_once(model: ModelArchitecture, pp: int) -> None:
    ranks = _ranks(model, ParallelLayout(pp=pp))
    held = sum(
        int(node.num_weights) for rank in ranks for node in lower_rank(_batch(1), _OPTIONS, rank)
    )
    copied = model.vocab * model.hidden if model.has_tied_embedding and pp > 1 else 0
    whole = sum(int(n.num_weights) for n in lower_forward(model, _batch(1), _OPTIONS))
    assert whole + copied == held


@given(st.data(), _models, _lengths)
def test_backward_gemms_are_twice_the_forward(
    data: st.DataObject, model: ModelArchitecture, length: int
) -> None:
    tp = data.draw(st.sampled_from(_tp_degrees(model)))
    (rank,) = _ranks(model, ParallelLayout(tp=tp))
    forward = lower_rank(_batch(length), _OPTIONS, rank)
    assert 2 * _flops(forward, "gemm") == _flops(lower_backward(forward), "gemm")


@given(
    st.builds(ParallelLayout, tp=_degrees, pp=_degrees, dp=_degrees),
    st.sampled_from(("tp", "dp", "pp")),
    st.integers(1, 8),
)
def test_a_group_has_as_many_ranks_as_its_axis(
    layout: ParallelLayout, axis: str, devices_per_node: int
) -> None:
    dims = group_dims(layout, axis, devices_per_node)
    assert layout.degree(axis) == dims["devices_per_node"] * dims["num_nodes"]
    assert dims["devices_per_node"] <= devices_per_node


_SERVED = sorted(all_models().values(), key=lambda model: model.name)


def _serving_batch(prefill_tokens: int, num_decodes: int, context: int) -> BatchShape:
    kv_tokens = num_decodes * context
    return BatchShape(
        num_tokens=prefill_tokens + num_decodes,
        num_output_rows=num_decodes + 1,
        prefill=PrefillShape(**prefill_dims(1, prefill_tokens, context)),
        decode=DecodeShape(num_seqs=num_decodes, kv_tokens=kv_tokens, kv_tokens_max=context),
    )


def test_served_weights_are_the_models_parameters() -> None:
    """Biases, sinks and a few norms are not lowered: under 0.2 %."""
    options = LoweringOptions(dtype=DType.BF16, has_kv_cache=True, has_sampler=True)
    for model in _SERVED:
        lowered = sum(
            int(n.num_weights) for n in lower_forward(model, _serving_batch(8, 4, 64), options)
        )
        count = count_parameters(model)
        # Encoders are held, and do not run.
        held = [part for part in model.extras if find_kind(part.kind).lower is None]
        beside = sum(part.total for part in count.parts if part.part in held)
        assert abs(lowered / (count.total - beside) - 1) < 2e-3, model.name


_batches = st.builds(
    _serving_batch, st.integers(1, 4096), st.integers(1, 256), st.integers(1, 8192)
)
_serving = st.builds(
    LoweringOptions,
    dtype=st.just(DType.BF16),
    has_kv_cache=st.just(True),
    has_sampler=st.just(True),
    fuses_add_norm=st.booleans(),
    quantization=st.sampled_from(("", *all_quantizations())),
    kv_dtype=st.sampled_from((None, DType.FP8)),
    mla_form=st.sampled_from(("module", "operators")),
    moe_imbalance_ratio=st.floats(1.0, 8.0),
    expert_exchange=st.sampled_from(EXPERT_EXCHANGES),
    has_expert_balancing=st.booleans(),
)


def _layouts(model: ModelArchitecture) -> list[ParallelLayout]:
    """Layouts of up to 8 devices that fit a model."""
    degrees = (1, 2, 4, 8)
    candidates = [
        ParallelLayout(tp=tp, pp=pp, dp=dp, ep=ep)
        for tp in degrees
        for pp in (1, 2)
        for dp in degrees
        for ep in degrees
        if tp * dp <= 8
    ]
    return [layout for layout in candidates if not _reasons(model, layout)]


def _reasons(model: ModelArchitecture, layout: ParallelLayout) -> str:
    try:
        check_layout(RankContext(model=model, layout=layout, devices_per_node=8))
    except InvalidRequestError as err:
        return err.message
    return ""


@given(st.data(), st.sampled_from(_SERVED), _batches, _serving)
def test_served_operators_have_whole_legal_dimensions(
    data: st.DataObject, model: ModelArchitecture, batch: BatchShape, options: LoweringOptions
) -> None:
    layout = data.draw(st.sampled_from(_layouts(model)))
    for rank in _ranks(model, layout):
        for node in lower_rank(batch, options, rank):
            find_operator(node.operator).check_dims(node.dims)
            assert all(type(value) is int for value in node.dims.values()), node
            assert not node.is_group_wide or rank.has_lock_step


@given(st.data(), st.sampled_from(_SERVED), _batches, _serving)
def test_collectives_come_with_their_axis(
    data: st.DataObject, model: ModelArchitecture, batch: BatchShape, options: LoweringOptions
) -> None:
    layout = data.draw(st.sampled_from(_layouts(model)))
    nodes = lower_rank(batch, options, _ranks(model, layout)[0])
    found = {n.operator for n in nodes if find_operator(n.operator).is_collective}
    if layout.tp == layout.ep == 1:
        assert found <= {"send_recv"}
    if layout.ep == 1:
        assert not found & {"all_to_all", "reduce_scatter"}


@given(st.data(), st.sampled_from([m for m in _SERVED if m.moe]), _batches, _serving)
def test_ranks_together_hold_every_expert_once(
    data: st.DataObject, model: ModelArchitecture, batch: BatchShape, options: LoweringOptions
) -> None:
    layout = data.draw(st.sampled_from(_layouts(model)))
    assert model.moe is not None
    expert = 3 * model.hidden * model.moe.expert_intermediate * model.moe.num_experts
    held = sum(
        int(node.num_weights)
        for rank in _ranks(model, layout)
        for node in lower_rank(batch, options, rank)
        if node.role == "moe_experts"
    )
    num_ranks = layout.tp * layout.dp if layout.ep > 1 else layout.tp
    assert expert * (model.num_layers - model.moe.num_dense_layers) == held * num_ranks


@given(st.data(), st.sampled_from(_SERVED), _batches, _serving, st.integers(1, 512))
def test_more_tokens_are_never_less_work(
    data: st.DataObject,
    model: ModelArchitecture,
    batch: BatchShape,
    options: LoweringOptions,
    more: int,
) -> None:
    (rank, *_) = _ranks(model, data.draw(st.sampled_from(_layouts(model))))
    assert batch.prefill is not None
    context = batch.prefill.kv_tokens - batch.prefill.q_tokens
    longer = dataclasses.replace(
        batch,
        num_tokens=batch.num_tokens + more,
        prefill=PrefillShape(**prefill_dims(1, batch.prefill.q_tokens + more, context)),
    )
    first, second = (_all_flops(lower_rank(shape, options, rank)) for shape in (batch, longer))
    assert first <= second


def _all_flops(nodes: Iterable[OperatorNode]) -> float:
    work = (
        find_operator(node.operator).flops(node.dims, node.dtype.num_bytes) * node.repeat
        for node in nodes
    )
    return float(sum(work))


@given(st.data(), st.sampled_from(_SERVED), _serving)
def test_quantized_weights_never_take_more(
    data: st.DataObject, model: ModelArchitecture, options: LoweringOptions
) -> None:
    (rank, *_) = _ranks(model, data.draw(st.sampled_from(_layouts(model))))
    batch = _serving_batch(16, 4, 64)
    plain = lower_rank(batch, dataclasses.replace(options, quantization=""), rank)
    stored = lower_rank(batch, options, rank)
    assert sum(n.weights_bytes for n in stored) <= sum(n.weights_bytes for n in plain)
