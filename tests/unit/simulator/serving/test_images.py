"""Prompts with images: how many tokens those are, what encoding them takes, and when."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from serving_fakes import RooflinePredictor, build_scenario, simulate

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.lowering.graph import OperatorNode, RankContext
from foretoken.domain.lowering.image_encoder import lower_encoder
from foretoken.domain.measurements.estimate import DType, LatencyQuery
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.models.image import EncodedImages, encode_images, find_encoder
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest, ServingSpace
from foretoken.domain.requests.workload import ImageSpec, LengthSpec, SessionSpec, WorkloadSpec
from foretoken.simulator.cost.answer import table_of_node
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces, replica_ranks, surface_spec
from foretoken.simulator.cost.tables import StepShape, stage_us
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import ServingSearch
from foretoken.simulator.serving.step_cost import SurfaceCost

_SIGHTED = find_model("qwen3-vl-235b-a22b")
_ENCODER = find_encoder(_SIGHTED)
# Small enough for one device, with the eyes of a large one.
_MODEL = replace(find_model("qwen2-7b"), extras=(_ENCODER,) if _ENCODER else ())


@pytest.mark.parametrize(
    ("model", "size", "num_patches", "num_tokens"),
    [
        ("qwen3-vl-235b-a22b", (1024, 1024), 64 * 64, 32 * 32),
        ("qwen3-vl-235b-a22b", (500, 30), 2 * 32, 16),
        ("kimi-k2.5-int4", (1024, 1024), 4 * 37 * 37, 37 * 37),
        # 21 x 21 are more than the 280 tokens that an image may have.
        ("gemma-4-31b-nvfp4", (1024, 1024), 9 * 16 * 16, 16 * 16),
        ("gemma-4-31b-nvfp4", (480, 480), 9 * 100, 100),
    ],
)
def test_patches_are_merged_to_tokens(
    model: str, size: tuple[int, int], num_patches: int, num_tokens: int
) -> None:
    height, width = size
    found = encode_images(find_model(model), ImageSpec(num_images=2, height=height, width=width), 5)
    assert found == EncodedImages(
        num_images=2, num_patches=num_patches, tokens_each=num_tokens, first_token=5
    )
    assert found.num_tokens == 2 * num_tokens


@pytest.mark.parametrize(
    ("model", "num_images"),
    [("qwen3-vl-235b-a22b", 2 * 5), ("gemma-4-31b-nvfp4", 2 * 9)],
)
def test_frames_of_a_video_are_encoded_as_many_together_as_a_patch_reaches_over(
    model: str, num_images: int
) -> None:
    """Nine frames, the last of which is alone in its pair."""
    one = encode_images(find_model(model), ImageSpec(num_images=2))
    assert replace(one, num_images=num_images) == encode_images(
        find_model(model), ImageSpec(num_images=2, num_frames=9)
    )


def _rank(model: ModelArchitecture = _MODEL, **layout: int) -> RankContext:
    scenario = build_scenario(model=model, device="h100_sxm", layout=ParallelLayout(**layout))
    return replica_ranks(surface_spec(scenario, 64))[0]


def _flops(nodes: list[OperatorNode], *operators: str) -> float:
    return sum(
        node.repeat * float(find_operator(node.operator).flops(dict(node.dims), 2.0))
        for node in nodes
        if node.operator in operators
    )


_IMAGES = EncodedImages(num_images=2, num_patches=4096, tokens_each=1024)


def test_an_encoder_multiplies_every_patch_by_all_its_matrices() -> None:
    """27 layers of width 1152 with an MLP of 4304; four projectors 4608 wide of merged patches."""
    nodes = lower_encoder(_rank(), _IMAGES, DType.FP8)
    layer = 4 * 1152**2 + 2 * 1152 * 4304
    matrices = 8192 * (27 * layer + 1536 * 1152)
    matrices += 2048 * 4 * (4608**2 + 4608 * _MODEL.hidden)
    assert _flops(nodes, "gemm") == 2 * matrices
    assert _flops(nodes, "encoder_attention") == 27 * 4 * 2 * 4096**2 * 1152
    assert {DType.BF16} == {node.dtype for node in nodes}
    assert not [node for node in nodes if node.operator == "all_reduce"]


def test_tensor_parallelism_splits_an_encoder_whose_heads_it_divides() -> None:
    alone = lower_encoder(_rank(), _IMAGES, DType.BF16)
    split = lower_encoder(_rank(tp=4), _IMAGES, DType.BF16)
    assert _flops(split, "encoder_attention") == _flops(alone, "encoder_attention") / 4
    # Patches become features of all heads on every rank; the rest is split.
    whole = 2 * 8192 * 1536 * 1152
    assert _flops(split, "gemm") - whole == (_flops(alone, "gemm") - whole) / 4
    (sums,) = [node for node in split if node.operator == "all_reduce"]
    assert (sums.repeat, sums.dims["message_bytes"]) == (54, 2 * 8192 * 1152)
    # Seven of 28 heads of the model each, but not of the encoder's 16.
    odd = lower_encoder(_rank(tp=7), _IMAGES, DType.BF16)
    assert _flops(odd, "encoder_attention") == _flops(alone, "encoder_attention")


def test_a_model_of_text_encodes_nothing() -> None:
    assert lower_encoder(_rank(find_model("qwen2-7b")), _IMAGES, DType.BF16) == []
    with pytest.raises(InvalidRequestError, match=r"workload\.images: qwen2-7b has no encoder"):
        encode_images(find_model("qwen2-7b"), ImageSpec())


def _scenario(images: ImageSpec | None, prompt: int = 3000, **changes: object) -> ServingScenario:
    workload = WorkloadSpec(
        arrival="constant",
        rate_rps=0.01,
        num_requests=1,
        prefill=LengthSpec(mean=prompt),
        decode=LengthSpec(mean=4),
        images=images,
    )
    return build_scenario(model=_MODEL, device="h100_sxm", workload=replace(workload, **changes))  # type: ignore[arg-type]


_TWO = ImageSpec(num_images=2)


def _prefill_us(scenario: ServingScenario, new: int, context: int) -> float:
    cost = SurfaceCost(fetch_surfaces(surface_spec(scenario, 8000), RooflinePredictor()))
    shape = StepShape(new, 0, 0, 0, 0, 1)
    pieces = (np.array([new], dtype=np.int32), np.array([context], dtype=np.int32))
    return stage_us(cost.tables, 0, shape, *pieces)


def _encoding_us() -> float:
    """Return what the operators of the encoder take, each requested alone."""
    rank = replica_ranks(surface_spec(_scenario(_TWO), 8000))[0]
    nodes = lower_encoder(rank, _IMAGES, DType.BF16)
    query = LatencyQuery(device="h100_sxm", tables=tuple(map(table_of_node, nodes)))
    answers = RooflinePredictor().predict(query).tables
    times_us = [float(np.asarray(answer.latency_us)[0]) for answer in answers]
    return sum(node.repeat * time_us for node, time_us in zip(nodes, times_us, strict=True))


def test_a_prefill_pays_for_the_images_whose_tokens_it_computes() -> None:
    """Two images of 1,024 tokens at the beginning of a prompt."""
    seeing, blind = _scenario(_TWO), _scenario(None)
    encoding_us = _encoding_us()
    for new, context, share in (
        (2048, 0, 1.0),
        (1024, 0, 0.5),
        (1024, 1024, 0.5),
        (500, 2048, 0.0),
    ):
        added_us = _prefill_us(seeing, new, context) - _prefill_us(blind, new, context)
        assert added_us == pytest.approx(share * encoding_us, rel=0.02, abs=1.0)


def test_the_first_token_of_a_prompt_waits_for_its_images() -> None:
    seen, blind = (simulate(_scenario(images)) for images in (_TWO, None))
    added_ms = seen.ttft_ms.mean - blind.ttft_ms.mean
    assert added_ms == pytest.approx(_encoding_us() / 1e3, rel=0.05)
    assert seen.itl_ms.mean == pytest.approx(blind.itl_ms.mean)
    assert seen.mfu_ratio < blind.mfu_ratio


def test_a_later_turn_finds_its_images_in_the_prefix_cache() -> None:
    turns = SessionSpec(turns=LengthSpec(mean=2), think_s=1.0, shared_prefix_tokens=512)
    engine = EngineSpec(profile="plain", rules={"has_prefix_caching": "true"})
    cached, blind = (
        simulate(replace(_scenario(images, sessions=turns, num_requests=2), engine=engine))
        for images in (_TWO, None)
    )
    first_ms, second_ms = (
        1e3 * (np.asarray(report.requests.first_token_s) - np.asarray(report.requests.arrival_s))
        for report in (cached, blind)
    )
    added_ms = first_ms - second_ms
    assert added_ms[0] == pytest.approx(_encoding_us() / 1e3, rel=0.05)
    assert abs(added_ms[1]) < 0.01 * added_ms[0]


def test_prompts_must_have_room_for_their_images() -> None:
    problem = r"workload\.images: 2 of 1024 tokens each.* at least 2048 tokens; found 2000"
    with pytest.raises(InvalidRequestError, match=problem):
        surface_spec(_scenario(_TWO, prompt=2000), 64)
    lengths = LengthSpec(kind="lognormal", mean=3000, spread=1.0)
    with pytest.raises(InvalidRequestError, match="found 1"):
        surface_spec(_scenario(_TWO, prefill=lengths), 64)
    assert surface_spec(_scenario(_TWO, prefill=replace(lengths, minimum=2048)), 64).images


def test_the_closed_form_of_a_search_counts_images_as_the_simulation_does() -> None:
    scenario = replace(_scenario(_TWO), engine=EngineSpec(profile="vllm-0.31"))
    workload = WorkloadSpec(
        num_requests=8, prefill=LengthSpec(mean=2600), decode=LengthSpec(mean=100), images=_TWO
    )
    request = ServingSearchRequest(
        scenario=replace(scenario, workload=workload),
        space=ServingSpace(
            max_devices=1,
            modes=("aggregated",),
            tp=(1,),
            max_num_seqs=(32,),
            max_num_batched_tokens=(2048,),
        ),
        num_finalists=1,
    )
    search = ServingSearch(cast("PredictorPort", RooflinePredictor()))
    report = search.run(request, InlineContext())
    (finalist,) = report.finalists
    assert report.candidates.tpot_ms[0] == pytest.approx(finalist.report.tpot_ms.mean, rel=0.06)
    text = replace(request, scenario=replace(scenario, workload=replace(workload, images=None)))
    blind = search.run(text, InlineContext())
    assert blind.candidates.tpot_ms[0] < 0.8 * report.candidates.tpot_ms[0]
