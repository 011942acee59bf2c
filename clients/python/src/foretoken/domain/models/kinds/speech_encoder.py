"""Whisper's encoder of sound, whose output stands among the tokens."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    hidden, inner = d["hidden"], d["intermediate"]
    # Keys have no bias; two norms.
    layer = 4 * hidden**2 + 3 * hidden + 2 * hidden * inner + hidden + inner + 4 * hidden
    convolutions = 3 * hidden * (d["mel_bins"] + hidden) + 2 * hidden
    ends = convolutions + d["num_positions"] * hidden + 2 * hidden
    middle = d["projector_intermediate"]
    into = d["projector_in"]
    projector = into * middle + middle * model.hidden if middle else (into + 1) * model.hidden
    yield Weights(total=d["num_layers"] * layer + ends + projector, active=0)


KIND = KindSpec(
    name="speech_encoder",
    place=Place.MODEL,
    summary="Whisper's transformer over windows of sound, projected to the model's width",
    source="Radford et al., 2022; modelling files of Qwen2-Audio, Qwen's Omni models and Voxtral in"
    " transformers 5",
    dims=(
        KindDim("num_layers", "its layers", minimum=1),
        KindDim("hidden", "features of a frame inside", minimum=1),
        KindDim("num_heads", "heads of its attention", minimum=1),
        KindDim("intermediate", "features between the products of its MLP", minimum=1),
        KindDim("mel_bins", "numbers of a frame", 128, minimum=1),
        KindDim("num_positions", "frames of a window", 1500, minimum=1),
        KindDim("frames_per_s", "frames of a second", 50, minimum=1),
        KindDim("merged_frames", "frames that become one token", 1, minimum=1),
        KindDim("has_whole_windows", "1: what fills a window up becomes tokens as well", 0),
        KindDim("projector_in", "features that the projector takes", minimum=1),
        KindDim("projector_intermediate", "features inside it; 0: it is one matrix", 0),
    ),
    weights=_weights,
    backward="none of its own: text is trained on, which an encoder hears nothing of",
    approximated="runs where a workload has sound; the convolutions of Qwen3-Omni are Whisper's",
)
