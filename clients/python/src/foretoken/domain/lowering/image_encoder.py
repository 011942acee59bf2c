"""The operators of an encoder of images or sound on one rank of tensor parallelism.

Engines split its layers over tp as those of the model, where its heads can be split, and run it
next to the first layers. Source: vLLM 0.20, model_executor/models/qwen3_vl.py and vision.py
(`mm_encoder_tp_mode` weights), whisper.py, in 16 bits whatever the model is stored in.
"""

from collections.abc import Iterator

from foretoken.domain.lowering.communication import axis_group, group_dims
from foretoken.domain.lowering.encoder_layers import (
    Call,
    list_conformer_calls,
    list_layer_calls,
    list_speech_ends,
)
from foretoken.domain.lowering.graph import OperatorNode, RankContext, Section
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.image import EncodedImages
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.operators.spec.operator import find_operator


def lower_encoder(rank: RankContext, images: EncodedImages, dtype: DType) -> list[OperatorNode]:
    """Return what a rank computes to encode the images or sound of one prompt, in one pass."""
    encoder = next((part for part in rank.model.extras if part.kind == images.kind), None)
    if encoder is None:
        return []
    dtype = DType.BF16 if dtype is DType.FP8 else dtype
    tokens = images.num_images * images.num_patches
    # Conformers and encoders that are known by their sums are whole on every rank.
    is_split = encoder.dims.get("num_heads", 1) % rank.layout.tp == 0
    tp = rank.layout.tp if is_split and encoder.kind != "audio_encoder" else 1
    if encoder.kind == "audio_encoder":
        nodes = list_conformer_calls(encoder, rank.model.hidden, images)
    elif encoder.kind == "summed_encoder":
        nodes = list(_products(encoder, rank.model.hidden, images))
    else:
        ends = _ends if encoder.kind == "encoder" else list_speech_ends
        sizes = (tokens, images.num_images)
        nodes = [
            *list_layer_calls(encoder, sizes, tp),
            *ends(encoder, rank.model.hidden, images, tp),
        ]
    if tp > 1:
        group = group_dims(rank.layout, "tp", rank.devices_per_node)
        message = {"message_bytes": dtype.bytes_of(tokens * encoder["hidden"]), **group}
        nodes.append(("sum", "all_reduce", message, 2 * encoder["num_layers"]))
    return [
        OperatorNode(
            role=f"encoder_{role}",
            group=find_operator(operator).group,
            section=Section.EMBEDDING,
            operator=operator,
            dims=dims,
            dtype=dtype,
            repeat=repeat,
            axis=axis_group(rank.layout, "tp").axis if operator == "all_reduce" else "",
        )
        for role, operator, dims, repeat in nodes
    ]


def _products(part: LayerPart, width: int, images: EncodedImages) -> Iterator[Call]:
    """Return one product of as many multiplications, and what projects its tokens."""
    rows = images.num_images * images.num_patches * part["repeats"]
    out = part["projected"] or width
    yield "layers", "gemm", {"m": rows, "n": out, "k": max(part["num_weights"] // out, 1)}, 1
    if part["projected"]:
        yield "projector", "gemm", {"m": images.num_tokens, "n": width, "k": out}, 1


def _ends(part: LayerPart, width: int, images: EncodedImages, tp: int) -> Iterator[Call]:
    """Return what makes patches of pixels, and tokens of patches."""
    patches, tokens = images.num_images * images.num_patches, images.num_tokens
    into, middle = part["projector_in"] or part["hidden"], part["projector_intermediate"]
    repeat = part["num_projectors"]
    yield "patches", "gemm", {"m": patches, "n": part["hidden"], "k": part["patch_features"]}, 1
    if not middle:
        yield "projector", "gemm", {"m": tokens, "n": width, "k": into}, repeat
        return
    inner = -(-middle // tp)
    yield "projector_up", "gemm", {"m": tokens, "n": inner, "k": into}, repeat
    yield "projector_activation", "gelu", {"num_tokens": tokens, "intermediate": inner}, repeat
    for _ in range(part["projector_inner"]):
        yield "projector_inner", "gemm", {"m": tokens, "n": inner, "k": middle}, repeat
    yield "projector_down", "gemm", {"m": tokens, "n": width, "k": inner}, repeat
