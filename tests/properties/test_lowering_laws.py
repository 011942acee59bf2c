"""Laws of lowering: what cutting a model must not change."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.estimate import DType
from foretoken.domain.graph import BatchShape, OperatorNode, PrefillShape, RankContext, Section
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.lowering import LoweringOptions, lower_backward, lower_forward, lower_rank
from foretoken.domain.models.architecture import ModelArchitecture, all_models
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.operator import find_operator
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.placement import group_dims

_OPTIONS = LoweringOptions(dtype=DType.BF16, has_loss=True)
_DENSE = sorted(
    (model for model in all_models().values() if model.moe is None and model.mla is None),
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
    """Biases and a second norm of parallel branches are not lowered: under 0.2 %."""
    for model in _DENSE:
        lowered = sum(int(n.num_weights) for n in lower_forward(model, _batch(1), _OPTIONS))
        total = count_parameters(model).total
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
