"""Prompts with recordings: how many tokens those are, and what encoding them takes."""

from dataclasses import replace

import pytest
from serving_fakes import build_scenario, simulate

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.image_encoder import lower_encoder
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.models.sound import encode_sound
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.workload import ImageSpec, LengthSpec, SoundSpec, WorkloadSpec
from foretoken.simulator.cost.latency_surfaces import replica_ranks, surface_spec

_GEMMA = find_model("gemma-4-e2b")
_WHISPER = {"num_layers": 32, "hidden": 1280, "num_heads": 20, "intermediate": 5120}


def _hears(**dims: int) -> ModelArchitecture:
    part = LayerPart(kind="speech_encoder", dims={**_WHISPER, "projector_in": 1280, **dims})
    return replace(find_model("qwen2-7b"), extras=(part,))


_SHORT = _hears(merged_frames=2)
_WHOLE = _hears(merged_frames=4, has_whole_windows=1, projector_in=5120, projector_intermediate=64)
# Pieces of two seconds, and of one second of 13 frames, as Qwen's Omni models compute them.
_PIECES = _hears(num_positions=100, merged_frames=2, has_whole_windows=1)
_SECONDS = _hears(num_positions=13, frames_per_s=13, has_whole_windows=1)


@pytest.mark.parametrize(
    ("model", "seconds", "sizes"),
    [
        (_GEMMA, 3, (1, 75, 75)),
        (_GEMMA, 40, (1, 750, 750)),
        (_SHORT, 3, (1, 1500, 75)),
        (_SHORT, 40, (1, 1500, 750)),
        (_WHOLE, 3, (1, 1500, 375)),
        (_WHOLE, 40, (2, 1500, 375)),
        (_PIECES, 3, (2, 100, 50)),
        (_SECONDS, 3, (3, 13, 13)),
    ],
)
def test_seconds_become_frames_and_tokens(
    model: ModelArchitecture, seconds: float, sizes: tuple[int, int, int]
) -> None:
    found = encode_sound(model, SoundSpec(num_clips=3, seconds=seconds))
    windows, frames, tokens = sizes
    assert (3 * windows, frames, tokens) == (found.num_images, found.num_patches, found.tokens_each)


def _lower(model: ModelArchitecture, seconds: float, **layout: int) -> list[OperatorNode]:
    scenario = build_scenario(model=model, device="h100_sxm", layout=ParallelLayout(**layout))
    rank = replica_ranks(surface_spec(scenario, 64))[0]
    return lower_encoder(rank, encode_sound(model, SoundSpec(seconds=seconds)), DType.BF16)


def _flops(nodes: list[OperatorNode], operator: str) -> float:
    return sum(
        node.repeat * float(find_operator(operator).flops(dict(node.dims), 2.0))
        for node in nodes
        if node.operator == operator
    )


def test_whisper_computes_whole_windows() -> None:
    """3,000 frames before the convolution of stride two, 1,500 behind it; 75 tokens of 3 s."""
    nodes = _lower(_SHORT, 3)
    matrices = 3000 * 3 * 128 * 1280 + 1500 * 3 * 1280**2
    matrices += 1500 * 32 * (4 * 1280**2 + 2 * 1280 * 5120)
    matrices += 75 * 1280 * _SHORT.hidden
    assert _flops(nodes, "gemm") == 2 * matrices
    assert _flops(nodes, "encoder_attention") == 32 * 4 * 1500**2 * 1280
    split = _lower(_SHORT, 3, tp=4)
    assert _flops(split, "encoder_attention") == _flops(nodes, "encoder_attention") / 4


def test_a_conformer_computes_the_seconds_there_are_on_every_rank() -> None:
    """Twelve layers of 24 squares of 1,024 but for positions; chunks of 12 attend to 24 frames."""
    nodes = _lower(_GEMMA, 6)
    products = 12 * 23 * 1024**2 + 1024 * 1024 + 1024 * 1536 + 1536 * _GEMMA.hidden
    assert _flops(nodes, "gemm") == 2 * 150 * products
    assert _flops(nodes, "encoder_attention") == 12 * 4 * 13 * 12 * 24 * 1024
    assert _flops(_lower(_GEMMA, 6, tp=2), "gemm") == _flops(nodes, "gemm")


def test_queries_make_tokens_of_windows_of_a_conformers_frames() -> None:
    """Granite Speech: 50 frames of a second, of 15 of which three tokens are made."""
    dims = {"num_layers": 16, "hidden": 1024, "num_heads": 8, "chunk": 200, "context": 200}
    dims |= {"conv_kernel": 15, "sampled_features": 160, "output": 0, "conv_width": 2048}
    dims |= {"num_positions": 1025, "frame_ms": 20, "max_frames": 0, "query_window": 15}
    dims |= {"window_queries": 3, "query_layers": 2, "query_heads": 16, "query_intermediate": 4096}
    part = LayerPart(kind="audio_encoder", dims=dims)
    model = replace(find_model("llama-3-8b"), extras=(part,))
    heard = encode_sound(model, SoundSpec(seconds=3.1))
    assert (155, 33) == (heard.num_patches, heard.tokens_each)
    nodes = _lower(model, 3.1)
    layers = 16 * (2 * 2 * 4 + 4 + 3 * 2) * 1024**2 + 160 * 1024
    of_tokens = 2 * (6 + 2 * 4) * 1024**2 + 1024 * model.hidden
    of_frames = 2 * 2 * 1024**2
    assert _flops(nodes, "gemm") == 2 * (155 * layers + 33 * of_tokens + 165 * of_frames)
    queries = 2 * 33 * (3 + 15) * 1024
    assert _flops(nodes, "encoder_attention") == 4 * (16 * 200 * 200 * 1024 + queries)


def test_the_first_token_waits_for_the_encoder() -> None:
    workload = WorkloadSpec(
        arrival="constant",
        rate_rps=0.01,
        num_requests=1,
        prefill=LengthSpec(mean=1000),
        decode=LengthSpec(mean=4),
    )
    scenario = build_scenario(model=_WHOLE, device="h100_sxm", workload=workload)
    heard = replace(scenario, workload=replace(workload, sound=SoundSpec(seconds=60)))
    quiet_ms, heard_ms = (simulate(each).ttft_ms.mean for each in (scenario, heard))
    assert quiet_ms < heard_ms


def test_what_cannot_be_heard_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"workload\.sound: qwen2-7b has no encoder"):
        encode_sound(find_model("qwen2-7b"), SoundSpec())
    scenario = build_scenario(
        model=_WHOLE, workload=WorkloadSpec(prefill=LengthSpec(mean=300), sound=SoundSpec())
    )
    with pytest.raises(InvalidRequestError, match="need prompts of at least 375 tokens"):
        surface_spec(scenario, 64)
    both = replace(scenario, workload=replace(scenario.workload, images=ImageSpec()))
    with pytest.raises(InvalidRequestError, match="goes with no images"):
        surface_spec(both, 64)
