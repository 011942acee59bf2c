"""Models whose layers are of several kinds, trained: laws that hold whatever the kinds are."""

from dataclasses import replace

import pytest
from slow_cases import slow_but
from strategy_step import time_both_ways
from training_fakes import DEVICE, TOPOLOGY, RooflinePredictor, build_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.lowering.lower import lower_backward, lower_forward
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.models.layer import LayerKind, LayerPart, write_pattern
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.models.stack import stack_of
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.model_flops import count_model_flops
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.training.search import search_training
from foretoken.simulator.steps.chunk_placement import ChunkPlaces
from foretoken.simulator.steps.memory import ModelMemory
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.stage_operators import (
    lower_chunk,
    micro_batch_shape,
    training_options,
)
from foretoken.simulator.training.step import simulate_training


def _cut(preset: str, pattern: str) -> ModelArchitecture:
    """Return a preset with fewer layers, of those kinds that its pattern still names."""
    model = find_model(preset)
    layers = tuple(layer for layer in model.layers if layer.name in pattern)
    return replace(model, layers=layers, pattern=pattern, num_layers=0)


_EXPERTS = LayerPart(
    kind="experts",
    dims={"num_experts": 8, "top_k": 2, "intermediate": 1024, "shared_intermediate": 1024},
)
_MLP = LayerPart(kind="mlp", dims={"intermediate": 9216})
# Source of widths: config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct, with few experts.
_KIMI_LINEAR = ModelArchitecture(
    name="kimi-linear",
    hidden=2304,
    vocab=163840,
    max_position=4096,
    layers=(
        LayerKind(
            name="kda-mlp",
            mixer=LayerPart(kind="kda", dims={"num_heads": 32, "head_dim": 128}),
            feed_forward=_MLP,
        ),
        LayerKind(
            name="kda-experts",
            mixer=LayerPart(kind="kda", dims={"num_heads": 32, "head_dim": 128}),
            feed_forward=_EXPERTS,
        ),
        LayerKind(
            name="latent-experts",
            mixer=LayerPart(
                kind="latent",
                dims={
                    "num_heads": 32,
                    "q_lora_rank": 0,
                    "kv_lora_rank": 512,
                    "qk_nope_head_dim": 128,
                    "qk_rope_head_dim": 64,
                    "v_head_dim": 128,
                    "has_rope": 0,
                },
            ),
            feed_forward=_EXPERTS,
        ),
    ),
    pattern="kda-mlp 2*kda-experts latent-experts 3*kda-experts latent-experts",
)


def _gemma_layer(name: str, window: int) -> LayerKind:
    heads = {"num_heads": 32, "num_kv_heads": 16, "head_dim": 128, "qk_norm": 1}
    return LayerKind(
        name=name,
        mixer=LayerPart(kind="attention", dims={**heads, "window": window}),
        feed_forward=LayerPart(kind="mlp", dims={"intermediate": 21504}),
    )


# Source of widths: config.json of google/gemma-3-27b-it.
_GEMMA_3 = ModelArchitecture(
    name="gemma-3",
    hidden=5376,
    vocab=262208,
    max_position=131072,
    activation="gelu",
    has_tied_embedding=True,
    layers=(_gemma_layer("window", 1024), _gemma_layer("full", 0)),
    pattern="5*window full 2*window",
)
_FAMILIES = {
    "qwen3.5": _cut("qwen3.5-35b-a3b", "2*(3*delta-experts full-experts)"),
    "qwen3.5 dense": _cut("qwen3.5-27b", "2*(3*delta-mlp full-mlp)"),
    "deepseek-v3.2": _cut("deepseek-v3.2", "sparse-mlp 3*sparse-experts"),
    "deepseek-v3": replace(find_model("deepseek-v3"), num_layers=4),
    "kimi linear": _KIMI_LINEAR,
    "gpt-oss": replace(find_model("gpt-oss-20b"), num_layers=8),
    "gemma 3": _GEMMA_3,
    "gemma 4": _cut("gemma-4-26b-a4b", "2*(3*window-experts full-experts)"),
    "nemotron 3": _cut("nemotron-3-nano-30b-a3b", "2*(mamba experts) full mamba experts mamba"),
    "nemotron-h": _cut("nemotron-h-56b", "2*(mamba mlp) full mlp mamba mlp"),
    "llama 4": _cut("llama-4-scout-17b-16e", "2*(3*chunk-experts full-experts)"),
    "glm 5": _cut("glm-5", "sparse-mlp 3*sparse-experts"),
    "minimax m2": _cut("minimax-m2.5", "4*full-experts"),
    "minimax m3": _cut("minimax-m3", "full-mlp 3*blocks-experts"),
}
_LENGTH = 16384
every_family = pytest.mark.parametrize(
    "family", slow_but(["qwen3.5", "deepseek-v3.2", "gpt-oss", "nemotron 3"], _FAMILIES)
)


def _scenario(model: ModelArchitecture, **changes: object) -> TrainingScenario:
    fields: dict[str, object] = {
        "model": model,
        "layout": ParallelLayout(dp=8),
        "sequence_length": _LENGTH,
        "global_batch_size": 16,
        **changes,
    }
    return build_scenario(**fields)  # type: ignore[arg-type]


def _simulate(model: ModelArchitecture, **changes: object) -> TrainingReport:
    return simulate_training(_scenario(model, **changes), RooflinePredictor(), None)


def _forward(scenario: TrainingScenario) -> tuple[OperatorNode, ...]:
    options = training_options(scenario, scenario.trainer.resolve())
    return lower_forward(scenario.model, micro_batch_shape(scenario), options)


@every_family
def test_a_family_is_trained_over_stages_that_differ(family: str) -> None:
    model = _FAMILIES[family]
    has_experts = bool(stack_of(model).experts)
    layout = ParallelLayout(tp=2, pp=2, dp=2, ep=2 if has_experts else 1)
    whole, again = (_simulate(model, layout=layout, recompute=mode) for mode in ("none", "full"))
    for report in (whole, again):
        assert 0 < report.mfu_ratio < 1
        assert pytest.approx(report.step_time_ms) == sum(report.step_time_ms_by_group.values())
        assert 2 == len(report.memory)
    assert again.step_time_ms > whole.step_time_ms
    for mine, other in zip(again.memory, whole.memory, strict=True):
        assert mine.activations_bytes < other.activations_bytes
        assert mine.optimizer_bytes == other.optimizer_bytes


@every_family
def test_all_weights_of_a_family_are_trained(family: str) -> None:
    """But for sinks, decays and biases of experts, and what stands outside the layers."""
    model = replace(_FAMILIES[family], extras=())
    held = sum(int(node.num_weights) for node in _forward(_scenario(model)))
    assert pytest.approx(count_parameters(model).total, rel=2e-3) == held


@every_family
def test_products_take_two_operations_for_each_active_weight_and_twice_that_backward(
    family: str,
) -> None:
    """6ND: forward 2, and 4 backward, with the head and without the embedding."""
    model = replace(_FAMILIES[family], extras=())
    scenario = _scenario(model)
    forward = _forward(scenario)
    backward = lower_backward(forward, training_options(scenario, scenario.trainer.resolve()))
    counted = count_parameters(model)
    active = counted.active_total - (0 if model.has_tied_embedding else counted.embedding)
    is_product = {"gemm", "grouped_gemm", "grouped_gemm_wgrad", "batched_gemm"}

    def operations(nodes: tuple[OperatorNode, ...]) -> float:
        return sum(
            float(find_operator(node.operator).flops(node.dims, 2.0))
            * node.repeat
            * node.share
            * find_operator(node.operator).work_ratio(node.phase)
            for node in nodes
            if node.operator in is_product
        )

    assert pytest.approx(2 * active * _LENGTH, rel=5e-3) == operations(forward)
    assert pytest.approx(4 * active * _LENGTH, rel=5e-3) == operations(backward)


@every_family
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_add_up_to_the_model(family: str, stages: int) -> None:
    model = _FAMILIES[family]
    whole = _scenario(model)
    cut = _scenario(model, layout=ParallelLayout(pp=stages, dp=8))
    orders = find_schedule("one_f_one_b").orders(stages, 4, 1)
    options, places = training_options(cut, cut.trainer.resolve()), ChunkPlaces.of_orders(orders)
    chunks = [lower_chunk(cut, options, rank, None, places) for rank in chunk_ranks(cut)]
    forward = _forward(whole)
    assert pytest.approx(count_model_flops(forward)) == sum(
        count_model_flops(chunk.forward) for chunk in chunks
    )
    inside = [node for chunk in chunks for node in chunk.forward if node.section is Section.LAYER]
    assert sum(int(node.num_weights) for node in forward if node.section is Section.LAYER) == sum(
        int(node.num_weights) for node in inside
    )
    needs = [
        ModelMemory(scenario).measure(ModelMemory(scenario).cut(layers, ranks))[0].saved.sum()
        for scenario, layers, ranks in (
            (whole, [model.num_layers], [[0]]),
            (cut, [model.num_layers // stages] * stages, [[at] for at in range(stages)]),
        )
    ]
    assert needs[0] == needs[1]


def _in_a_pattern(model: ModelArchitecture) -> ModelArchitecture:
    """Return a model that names its layers, and is otherwise the same."""
    halves = list(
        dict.fromkeys((layer.mixer, layer.feed_forward) for layer in stack_of(model).layers)
    )
    layers = tuple(
        LayerKind(name=f"kind-{number}", mixer=mixer, feed_forward=half)
        for number, (mixer, half) in enumerate(halves)
    )
    names = [
        f"kind-{halves.index((layer.mixer, layer.feed_forward))}"
        for layer in stack_of(model).layers
    ]
    return ModelArchitecture(
        name=model.name,
        hidden=model.hidden,
        vocab=model.vocab,
        max_position=model.max_position,
        activation=model.activation,
        norm=model.norm,
        position=model.position,
        has_tied_embedding=model.has_tied_embedding,
        layers=layers,
        pattern=write_pattern(names),
        extras=model.extras,
    )


@pytest.mark.parametrize("preset", ["llama-3.2-1b", "qwen3-8b", "mixtral-8x7b", "gpt-oss-20b"])
@pytest.mark.parametrize(
    "trainer",
    slow_but(["megatron-core"], ["megatron-core", "torchtitan", "deepspeed-zero3-2021"]),
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_pattern_is_trained_as_the_fields_it_stands_for(
    preset: str, trainer: str, recompute: str
) -> None:
    uniform = replace(find_model(preset), num_layers=8)
    rules = {"can": "{}"}
    first, second = (
        _simulate(
            model,
            layout=ParallelLayout(tp=2, pp=2, dp=2),
            recompute=recompute,
            sequence_length=2048,
            trainer=TrainerSpec(profile=trainer, rules=rules),
        )
        for model in (uniform, _in_a_pattern(uniform))
    )
    assert first.step_time_ms == second.step_time_ms
    assert first.step_time_ms_by_group == second.step_time_ms_by_group
    assert first.memory == second.memory
    assert first.mfu_ratio == second.mfu_ratio


def test_windows_and_chunks_save_what_they_do_not_see() -> None:
    """A window as long as the sequence is none, and a chunk is a sequence of its own."""
    wide = _gemma_layer("window", _LENGTH)
    none = _gemma_layer("window", 0)
    narrow = _gemma_layer("window", 1024)
    assert narrow.mixer is not None
    chunked = replace(narrow, mixer=narrow.mixer.changed(window=0, chunk=_LENGTH // 4))
    wide_ms, none_ms, narrow_ms, chunked_ms = (
        _simulate(replace(_GEMMA_3, layers=(layer,), pattern="4*window", num_layers=0)).step_time_ms
        for layer in (wide, none, narrow, chunked)
    )
    assert wide_ms == none_ms
    assert narrow_ms < chunked_ms < none_ms


@pytest.mark.parametrize("family", ["qwen3.5", "nemotron 3", "kimi linear", "gpt-oss", "glm 5"])
def test_a_family_takes_in_columns_what_the_simulator_says(family: str) -> None:
    formula_ms, simulated_ms = time_both_ways(_scenario(_FAMILIES[family]), "none")
    assert pytest.approx(simulated_ms, rel=1e-4) == formula_ms


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3.5", "nemotron 3", "gemma 4", "llama 4"])
def test_strategies_of_a_family_are_searched(family: str) -> None:
    scenario = _scenario(_FAMILIES[family], sequence_length=2048, device=DEVICE, topology=TOPOLOGY)
    space = TrainingSpace(
        tp=(1, 2),
        pp=(1, 2, 4),
        cp=(1,),
        ep=(1, 8),
        micro_batch_sizes=(1,),
        recompute=("none", "full"),
        weight_parallel=("",),
        zero_stages=(1, 3),
        overlaps=("all",),
    )
    request = TrainingSearchRequest(scenario=scenario, space=space, num_finalists=2)
    report = search_training(request, RooflinePredictor(), InlineContext())
    assert report.num_legal > 0
    assert 2 == len(report.finalists)
    for finalist in report.finalists:
        assert pytest.approx(finalist.report.step_time_ms, rel=0.05) == finalist.closed_form_ms


@pytest.mark.parametrize(
    ("preset", "why"),
    [
        ("deepseek-v4-flash", "hyper_connections, which can be served only: how its mixing"),
        ("kimi-k3", "residual_attention, which can be served only: its mixing has no operators"),
    ],
)
def test_what_has_no_backward_pass_is_refused_by_name(preset: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        _simulate(find_model(preset))


def _with_cp(family: str, exchange: str) -> TrainingReport:
    layout = ParallelLayout(cp=2, dp=4)
    return _simulate(_FAMILIES[family], layout=layout, context_parallel=exchange)


@pytest.mark.parametrize(
    ("family", "exchange", "why"),
    [
        ("qwen3.5", "ring", "a recurrent state goes from one piece"),
        ("gemma 3", "ring", "has windows, which no ring passes on"),
        ("llama 4", "all_to_all", "has chunks"),
        ("glm 5", "all_to_all", "an indexer may choose tokens of any rank"),
    ],
)
def test_sequences_that_cannot_be_split_are_refused(family: str, exchange: str, why: str) -> None:
    feasibility = _with_cp(family, exchange).feasibility
    assert not feasibility.is_feasible
    assert why in feasibility.reason


def test_windows_are_split_by_exchanging_heads() -> None:
    alone, split = _simulate(_GEMMA_3), _with_cp("gemma 3", "all_to_all")
    of_split, of_one = (report.step_time_ms_by_group["attention"] for report in (split, alone))
    # Twice the micro batches, each of half the heads.
    assert pytest.approx(of_one, rel=0.05) == of_split
