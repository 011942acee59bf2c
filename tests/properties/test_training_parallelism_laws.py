"""Laws of cutting a training step over ranks: what no layout may change."""

import dataclasses
from collections.abc import Iterable
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import find_trainer
from foretoken.domain.lowering.communication import expert_mesh
from foretoken.domain.lowering.graph import (
    BatchShape,
    OperatorNode,
    Partition,
    PrefillShape,
    RankContext,
    Section,
)
from foretoken.domain.lowering.lower import (
    check_layout,
    lower_backward,
    lower_rank,
)
from foretoken.domain.lowering.options import (
    LoweringOptions,
    Nodes,
    TrainingOptions,
)
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout

_LENGTH = 512
_GEMMS = ("gemm", "grouped_gemm", "grouped_gemm_wgrad")
_ATTENTION = ("attention_prefill", "mla_prefill")
# Every kind of layer: dense, few key heads, tied, parallel residual, experts, shared experts after
# dense layers with latent attention. Fewer layers, so that a case is quick.
_MODELS = [
    dataclasses.replace(find_model(name), num_layers=4)
    for name in (
        "llama-2-7b",
        "llama-3-8b",
        "gpt2-xl",
        "gpt-neox-20b",
        "qwen3-8b",
        "mixtral-8x7b",
        "qwen3-30b-a3b",
        "deepseek-v3",
    )
]
_MOE = [model for model in _MODELS if model.moe]

_degrees = st.sampled_from((1, 2, 4))
_layouts = st.builds(
    ParallelLayout,
    tp=_degrees,
    cp=_degrees,
    dp=_degrees,
    pp=st.sampled_from((1, 2)),
    ep=st.sampled_from((1, 2, 4, 8)),
)
_trainings = st.builds(
    TrainingOptions,
    trainer=st.just(find_trainer("plain")),
    micro_batch_size=st.sampled_from((1, 2)),
    sequence_length=st.just(_LENGTH),
    sequence_parallel=st.booleans(),
    context_parallel=st.sampled_from(("ring", "all_to_all")),
    weight_parallel=st.sampled_from(("", "", "msp", "fsp", "isp")),
    weight_degree=st.sampled_from((1, 2, 4, 8)),
    expert_tp=st.sampled_from((0, 1, 2)),
)
_any_model = st.sampled_from(_MODELS)


def _options(training: TrainingOptions, dtype: DType = DType.BF16) -> LoweringOptions:
    return LoweringOptions(dtype=dtype, has_loss=True, training=training)


def _batch(training: TrainingOptions) -> BatchShape:
    num_seqs, length = training.micro_batch_size, training.sequence_length
    return BatchShape(
        num_tokens=num_seqs * length,
        num_output_rows=num_seqs * length,
        prefill=PrefillShape(**prefill_dims(num_seqs, length, 0)),
    )


def _ranks(model: ModelArchitecture, layout: ParallelLayout) -> list[RankContext]:
    return [
        RankContext(model=model, layout=layout, devices_per_node=8, stage=stage)
        for stage in range(layout.pp)
    ]


def _lower(
    model: ModelArchitecture, layout: ParallelLayout, training: TrainingOptions
) -> list[Nodes]:
    options = _options(training)
    return [lower_rank(_batch(training), options, rank) for rank in _ranks(model, layout)]


def _of_one_device(training: TrainingOptions) -> TrainingOptions:
    return dataclasses.replace(training, weight_parallel="", expert_tp=0)


def _is_legal(model: ModelArchitecture, layout: ParallelLayout, training: TrainingOptions) -> bool:
    try:
        check_layout(_ranks(model, layout)[0], _options(training))
    except InvalidRequestError:
        return False
    return True


def _work(nodes: Iterable[OperatorNode], operators: tuple[str, ...]) -> float:
    return sum(
        find_operator(node.operator).flops(node.dims, 2.0)
        * find_operator(node.operator).work_ratio(node.phase)
        * node.share
        * node.repeat
        for node in nodes
        if node.operator in operators
    )


def _is_repeated(node: OperatorNode, layout: ParallelLayout, training: TrainingOptions) -> bool:
    """Return whether every rank of tp runs the whole operator: it is not split by tokens either."""
    is_split = training.sequence_parallel or bool(training.weight_parallel)
    return node.role in ("moe_router", "attn_down_proj") and layout.tp > 1 and not is_split


def _is_even(model: ModelArchitecture, tp: int) -> bool:
    """Return whether ranks repeat no key head and pad no vocabulary."""
    has_heads = model.mla is not None or model.num_kv_heads % tp == 0
    return has_heads and model.vocab % tp == 0


@given(_any_model, _layouts, _trainings)
def test_all_ranks_together_do_the_work_of_the_whole_model(
    model: ModelArchitecture, layout: ParallelLayout, training: TrainingOptions
) -> None:
    """Every data-parallel rank has a micro batch of its own."""
    assume(_is_legal(model, layout, training) and _is_even(model, layout.tp))
    (whole,) = _lower(model, ParallelLayout(), _of_one_device(training))
    stages = _lower(model, layout, training)
    num_ranks = layout.tp * layout.cp
    repeated = [n for stage in stages for n in stage if _is_repeated(n, layout, training)]
    extra = _work(repeated, _GEMMS) * (layout.tp - 1) * layout.cp
    done = sum(_work(stage, _GEMMS) for stage in stages) * num_ranks
    assert _work(whole, _GEMMS) == done - extra
    attended = sum(_work(stage, _ATTENTION) for stage in stages) * num_ranks
    assert _work(whole, _ATTENTION) == attended


@given(_any_model, _layouts, _trainings)
def test_backward_work_is_that_of_the_gradients(
    model: ModelArchitecture, layout: ParallelLayout, training: TrainingOptions
) -> None:
    assume(_is_legal(model, layout, training))
    for forward in _lower(model, layout, training):
        backward = lower_backward(forward, _options(training))
        assert 2 * _work(forward, _GEMMS) == _work(backward, _GEMMS)
        for operator in _ATTENTION:
            ratio = find_operator(operator).backward_work_ratio
            expected = ratio * _work(forward, (operator,))
            assert abs(expected - _work(backward, (operator,))) <= 1e-9 * expected


@given(_any_model, _layouts, _trainings, st.sampled_from((DType.BF16, DType.FP8)))
def test_every_operator_of_a_rank_is_a_legal_call(
    model: ModelArchitecture, layout: ParallelLayout, training: TrainingOptions, dtype: DType
) -> None:
    """What goes between ranks has the activations' 16 bits where 8 are multiplied."""
    assume(_is_legal(model, layout, training))
    options = _options(training, dtype)
    for rank in _ranks(model, layout):
        forward = lower_rank(_batch(training), options, rank)
        for node in (*forward, *lower_backward(forward, options)):
            spec = find_operator(node.operator)
            spec.check_dims(node.dims)
            assert all(type(value) is int for value in node.dims.values()), node
            assert spec.is_collective == bool(node.axis), node
            assert not spec.is_collective or node.dtype is not DType.FP8


@given(_any_model, _layouts, _trainings)
def test_collectives_beside_an_operator_find_it_in_their_layers(
    model: ModelArchitecture, layout: ParallelLayout, training: TrainingOptions
) -> None:
    rules = {
        "overlaps_tensor_collectives": True,
        "overlaps_tensor_gradients": True,
        "overlaps_expert_exchange": True,
        "overlaps_context_exchange": True,
    }
    trainer = dataclasses.replace(training.trainer, **rules)  # type: ignore[arg-type]
    training = dataclasses.replace(training, trainer=trainer)
    assume(_is_legal(model, layout, training))
    for forward in _lower(model, layout, training):
        for nodes in (forward, lower_backward(forward, _options(training))):
            roles = {node.role: node for node in nodes}
            for node in nodes:
                if node.overlaps_with:
                    other = roles[node.overlaps_with]
                    assert set(_layers(node)) <= set(_layers(other)), (node, other)


def _layers(node: OperatorNode) -> range:
    stop = node.first_layer + node.repeat * node.layer_stride
    return range(node.first_layer, stop, node.layer_stride)


@given(_any_model, _layouts, _trainings)
def test_all_ranks_together_hold_every_parameter(
    model: ModelArchitecture, layout: ParallelLayout, training: TrainingOptions
) -> None:
    """Norms, routers and low ranks are whole on every rank; weights of isp before they part."""
    assume(_is_legal(model, layout, training) and _is_even(model, layout.tp))
    (whole,) = _lower(model, ParallelLayout(), _of_one_device(training))
    stages = _lower(model, layout, training)
    mesh = expert_mesh(layout, training.expert_tp)
    for role in {node.role for node in whole}:
        first = next(node for node in whole if node.role == role)
        num_weights = sum(int(node.num_weights) for node in whole if node.role == role)
        copies = [part for stage in stages for part in stage if part.role == role]
        held = sum(int(part.num_weights) for part in copies)
        if first.partition is Partition.ROW and first.has_bias:
            # Each rank has the whole bias of the sum.
            repeated = sum(int(part.dims["n"]) * part.repeat for part in copies)
            held -= repeated - repeated // _split(layout, training)
        if first.operator == "grouped_gemm":
            assert num_weights == held * mesh.tp * mesh.ep
        elif role == "lm_head" and model.has_tied_embedding:
            copied = model.vocab * model.hidden // _split(layout, training)
            assert (copied if layout.pp > 1 else 0) == held
        elif first.partition is Partition.REPLICATED or "norm" in first.operator:
            assert num_weights == held
        else:
            assert num_weights == held * _split(layout, training)


def _split(layout: ParallelLayout, training: TrainingOptions) -> int:
    return 1 if training.weight_parallel == "isp" else layout.tp


@given(_any_model, st.sampled_from((2, 4)), _trainings)
def test_splitting_tokens_moves_as_many_bytes_forward(
    model: ModelArchitecture, tp: int, training: TrainingOptions
) -> None:
    """An all-reduce is a reduce-scatter and an all-gather; backward one more gather is exposed."""
    assume(model.moe is None)
    layout = ParallelLayout(tp=tp)
    training = dataclasses.replace(training, weight_parallel="", sequence_parallel=False)
    split = dataclasses.replace(training, sequence_parallel=True)
    assume(_is_legal(model, layout, split))
    (plain,), (parted,) = _lower(model, layout, training), _lower(model, layout, split)
    assert _moved_bytes(plain) == _moved_bytes(parted)
    gathered = sum(_bytes_of(n) for n in parted if n.role.endswith("_input_all_gather"))
    in_layers = sum(
        _bytes_of(n)
        for n in parted
        if n.section is Section.LAYER and n.role.endswith("_input_all_gather")
    )
    backward = lower_backward(parted, _options(split))
    assert _moved_bytes(lower_backward(plain, _options(training))) + in_layers == _moved_bytes(
        backward
    )
    again = (n for n in backward if n.role.endswith("_saved_input_all_gather"))
    assert gathered == sum(_bytes_of(node) for node in again)


def _moved_bytes(nodes: Iterable[OperatorNode]) -> float:
    in_layers = (node for node in nodes if node.axis == "tp" and node.section is Section.LAYER)
    return sum(_bytes_of(node) for node in in_layers)


def _bytes_of(node: OperatorNode) -> float:
    return float(find_operator(node.operator).moved_bytes(node.dims, 2.0) * node.repeat)


@given(st.sampled_from(_MOE), _layouts, _trainings, st.floats(1.0, 4.0))
def test_imbalance_is_never_less_work_for_experts(
    model: ModelArchitecture, layout: ParallelLayout, training: TrainingOptions, ratio: float
) -> None:
    assume(_is_legal(model, layout, training))
    (rank, *_) = _ranks(model, layout)
    even = _options(training)
    uneven = dataclasses.replace(even, moe_imbalance_ratio=ratio)
    first, second = (
        _work(lower_rank(_batch(training), options, rank), ("grouped_gemm",))
        for options in (even, uneven)
    )
    assert first <= second


@given(_any_model, st.integers(1, 4), st.data())
def test_uneven_and_virtual_stages_hold_every_layer_once(
    model: ModelArchitecture, pp: int, data: st.DataObject
) -> None:
    """Chunks go around the pipeline; every one but the last sends to the next."""
    num_chunks = pp * data.draw(st.integers(1, 2))
    cuts = sorted(
        data.draw(st.lists(st.integers(0, 4), min_size=num_chunks - 1, max_size=num_chunks - 1))
    )
    edges = [0, *cuts, model.num_layers]
    layers = tuple(stop - start for start, stop in pairwise(edges))
    training = TrainingOptions(
        trainer=find_trainer("plain"), micro_batch_size=1, sequence_length=_LENGTH
    )
    options, layout = _options(training), ParallelLayout(pp=pp)
    (whole,) = _lower(model, ParallelLayout(), training)
    held = 0.0
    for stage in range(num_chunks):
        rank = RankContext(
            model=model, layout=layout, devices_per_node=8, stage=stage, layers_by_stage=layers
        )
        nodes = lower_rank(_batch(training), options, rank)
        held += _work(nodes, (*_GEMMS, *_ATTENTION))
        sends = [node.role for node in nodes if node.section is Section.BOUNDARY]
        assert (["stage_send"] if pp > 1 and stage < num_chunks - 1 else []) == sends
    assert _work(whole, (*_GEMMS, *_ATTENTION)) == held
