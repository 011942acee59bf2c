"""Ask the predictor once for everything a deployment's steps can cost.

A step's operators depend on few numbers: most on its tokens, the head and sampler on the
sequences that get a token, attention on the contexts. Each such family is tabulated on a grid.
"""

from collections.abc import Sequence
from dataclasses import replace

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.all_reduce_norm import find_fused_bytes
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.drawn_routing import counted_routing
from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import LatencyQuery
from foretoken.domain.measurements.step_model import StepModel
from foretoken.domain.models.image import EncodedImages, encode_images
from foretoken.domain.models.quantization import ExecutedQuantization, executed_quantization
from foretoken.domain.models.sound import encode_sound
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario, replica_layout
from foretoken.simulator.cost.answer import Questions
from foretoken.simulator.cost.form import SurfaceForm
from foretoken.simulator.cost.launching import launch_rules
from foretoken.simulator.cost.padding import graph_rule
from foretoken.simulator.cost.step_scope import check_scope
from foretoken.simulator.cost.surface import LatencySurfaces, Surface, SurfaceSpec
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.rank import stage_ranks

__all__ = [
    "LatencySurfaces",
    "Surface",
    "SurfaceSpec",
    "engine_layout",
    "fetch_forms",
    "fetch_surfaces",
    "replica_ranks",
    "serving_options",
    "surface_spec",
]


def surface_spec(scenario: ServingScenario, max_context: int) -> SurfaceSpec:
    """Return what the surfaces of a scenario depend on; contexts round up to a power of two.

    Raises:
        InvalidRequestError: the engine has a rule there is not.
        UnknownPluginError: no such engine.

    """
    engine = scenario.resolve_engine()
    return SurfaceSpec(
        model=scenario.model,
        device=scenario.device,
        topology=scenario.topology,
        framework=scenario.framework,
        engine=engine.engine,
        software=engine.software,
        kernels=tuple(sorted(scenario.kernels.items())),
        options=serving_options(scenario),
        layout=engine_layout(scenario),
        graphs=graph_rule(_capturing_engine(scenario)),
        launches=launch_rules(engine),
        piece_us=engine.piece_us,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_context=1 << max(max_context - 1, 1).bit_length(),
        rows_per_seq=_tokens_per_seq(scenario),
        two_batch_tokens=engine.two_batch_tokens if engine_layout(scenario).dp > 1 else 0,
        micro_batches=engine.ffn_micro_batches if engine.ffn_devices else 0,
        power_limit_w=scenario.power_limit_w,
        correction=scenario.correction,
        images=_images_of(scenario),
        fused_norm_bytes=(
            find_fused_bytes(find_device(scenario.device), engine_layout(scenario))
            if engine.fuses_all_reduce_norm
            else 0.0
        ),
        fuses_static_quantize=engine.fuses_static_quantize,
        expert_block_rows=engine.expert_block_rows,
        expert_block_kernel=engine.expert_block_kernel,
    )


def _images_of(scenario: ServingScenario) -> EncodedImages | None:
    """Return the images or sound of every prompt, for whose tokens the prompts must have room."""
    workload = scenario.workload
    if workload.is_text:
        return None
    shared = workload.sessions.shared_prefix_tokens if workload.sessions else 0
    if workload.images is not None:
        if workload.sound is not None:
            raise InvalidRequestError.of_field(
                "workload.sound", "goes with no images: leave it out"
            )
        images = encode_images(scenario.model, workload.images, shared)
    elif workload.sound is not None:
        images = encode_sound(scenario.model, workload.sound, shared)
    least = images.first_token + images.num_tokens
    if workload.num_prompt_tokens_min < least:
        problem = (
            f"{images.num_images} of {images.tokens_each} tokens each, which {scenario.model.name}"
            f" makes of them, need prompts of at least {least} tokens; found"
            f" {workload.num_prompt_tokens_min}"
        )
        field = "workload.images" if workload.images else "workload.sound"
        raise InvalidRequestError.of_field(field, problem)
    return images


def quantization_of(scenario: ServingScenario) -> ExecutedQuantization:
    """Return the quantisation that the engine runs on the device, and what to say of it."""
    engine = scenario.resolve_engine().engine
    return executed_quantization(scenario.quantization, find_device(scenario.device), engine)


def serving_options(scenario: ServingScenario) -> LoweringOptions:
    """Return how the scenario's engine runs its model.

    Raises:
        InvalidRequestError: the device cannot run the quantisation, nor the engine emulate it.

    """
    engine = scenario.resolve_engine()
    return LoweringOptions(
        dtype=scenario.dtype,
        has_kv_cache=True,
        has_sampler=True,
        fuses_add_norm=engine.fuses_add_norm,
        quantization=quantization_of(scenario).name,
        kv_dtype=scenario.kv_dtype,
        moe_imbalance_ratio=scenario.moe_imbalance_ratio,
        moe_routing=scenario.moe_routing or counted_routing(scenario.model),
        expert_exchange=engine.expert_exchange,
        has_expert_balancing=engine.has_expert_balancing,
        num_redundant_experts=engine.num_redundant_experts,
        ffn_devices=engine.ffn_devices,
        decode_context_parallel=engine.decode_context_parallel,
        repeats_queries=engine.repeats_queries,
        # No module was measured over a part of its context.
        mla_form="module" if engine.decode_context_parallel == 1 else "operators",
        lora=scenario.lora,
    )


def replica_ranks(spec: SurfaceSpec) -> tuple[RankContext, ...]:
    """Return one rank of every pipeline stage of an engine."""
    return stage_ranks(spec.model, spec.layout, spec.device, spec.topology)


def query_of(spec: SurfaceSpec) -> LatencyQuery:
    """Return the query of an engine's operators, without these: equal ones can be asked at once.

    It is about bursts; what lasts is asked about with `sustained`.
    """
    return LatencyQuery(
        device=spec.device,
        tables=(),
        topology=spec.topology,
        framework=spec.framework,
        preferred_framework=spec.software,
        prefer_measured=True,
        power_limit_w=spec.power_limit_w,
        correction=spec.correction,
    )


def fetch_surfaces(spec: SurfaceSpec, predictor: LatencySource) -> LatencySurfaces:
    """Return the surfaces of a deployment, in one query.

    Raises:
        InvalidRequestError: the layout does not fit the model, or a correction of whole steps was
            learned of something else.
        ForetokenError: whatever the predictor raises.

    """
    form = SurfaceForm(spec, replica_ranks(spec))
    (surfaces,), steps = fetch_forms(query_of(spec), [form], predictor)
    if steps is None:
        return surfaces
    check_scope(steps, spec)
    return replace(surfaces, steps=steps)


def fetch_forms(
    query: LatencyQuery,
    wanted: Sequence[SurfaceForm],
    predictor: LatencySource,
) -> tuple[list[LatencySurfaces], StepModel | None]:
    """Return the surfaces of engines of one query, asked for at once, and what corrects steps."""
    questions, slowed = Questions(), Questions()
    for form in wanted:
        questions.add_all(form.questions())
        slowed.add_all(form.lasting_questions())
    reply = predictor.predict(replace(query, tables=questions.tables))
    answers, slower = questions.match(reply.tables), None
    if slowed.tables:
        sustained = replace(query, sustained=True, tables=slowed.tables)
        slower = answers.replaced_by(slowed.match(predictor.predict(sustained).tables))
    found = [form.surfaces(answers, reply.model_version, slower) for form in wanted]
    return found, reply.steps


def _tokens_per_seq(scenario: ServingScenario) -> int:
    """Return how many tokens of a decoding sequence a step computes: one, and its drafts."""
    return 1 + (scenario.speculative.num_draft_tokens if scenario.speculative else 0)


def _capturing_engine(scenario: ServingScenario) -> EngineProfile:
    """Return the engine with the batches it captures, which count the drafts of its sequences."""
    engine = scenario.resolve_engine()
    if scenario.speculative is None or not engine.graph_tokens_per_seq:
        return engine
    num_tokens = engine.graph_tokens_per_seq * _tokens_per_seq(scenario)
    rules = {**scenario.engine.rules, "graph_tokens_per_seq": str(num_tokens)}
    return replace(scenario, engine=replace(scenario.engine, rules=rules)).resolve_engine()


def engine_layout(scenario: ServingScenario) -> ParallelLayout:
    """Return the layout of an engine: replicas are alike, unless they share experts."""
    return replica_layout(scenario.layout)
