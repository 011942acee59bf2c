"""The operators of an encoder of images on one rank of tensor parallelism.

Engines split its layers over tp as those of the model, where its heads can be split, and run it
next to the first layers. Source: vLLM 0.20, model_executor/models/qwen3_vl.py and vision.py
(`mm_encoder_tp_mode` weights), in 16 bits whatever the model is stored in.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.lowering.communication import axis_group, group_dims
from foretoken.domain.lowering.graph import OperatorNode, RankContext, Section
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.image import EncodedImages, find_encoder
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.operators.spec.operator import find_operator


def lower_encoder(rank: RankContext, images: EncodedImages, dtype: DType) -> list[OperatorNode]:
    """Return what a rank computes to encode the images of one prompt, all in one pass."""
    encoder = find_encoder(rank.model)
    if encoder is None:
        return []
    dtype = DType.BF16 if dtype is DType.FP8 else dtype
    tokens = images.num_images * images.num_patches
    tp = rank.layout.tp if encoder["num_heads"] % rank.layout.tp == 0 else 1
    sizes = (tokens, images.num_images)
    nodes = [*_layer(encoder, sizes, tp), *_ends(encoder, rank, images, tp)]
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


# A role, its operator, dimensions and how often it runs.
_Call = tuple[str, str, Mapping[str, float], int]


def _layer(part: LayerPart, sizes: tuple[int, int], tp: int) -> Iterator[_Call]:
    """Return the operators of the layers; `sizes` are all patches, and images."""
    tokens, num_images = sizes
    hidden, repeat = part["hidden"], part["num_layers"]
    width = part["attention_width"] or hidden
    heads, inner = part["num_heads"] // tp, -(-part["intermediate"] // tp)
    own = {"num_tokens": tokens, "hidden": hidden}
    attention = {
        "num_seqs": num_images,
        "num_tokens": tokens,
        "score_pairs": tokens * (tokens // num_images),
        "num_heads": heads,
        "head_dim": width // part["num_heads"],
    }
    norm = "rms_norm" if part["is_gated"] else "layer_norm"
    activation = "silu_mul" if part["is_gated"] else "gelu"
    up = (1 + part["is_gated"]) * inner
    yield "norm", norm, own, 2 * repeat
    yield "qkv_proj", "gemm", {"m": tokens, "n": 3 * width // tp, "k": hidden}, repeat
    yield "attention", "encoder_attention", attention, repeat
    yield "out_proj", "gemm", {"m": tokens, "n": hidden, "k": width // tp}, repeat
    yield "up_proj", "gemm", {"m": tokens, "n": up, "k": hidden}, repeat
    yield "activation", activation, {"num_tokens": tokens, "intermediate": inner}, repeat
    yield "down_proj", "gemm", {"m": tokens, "n": hidden, "k": inner}, repeat
    yield "residual", "residual_add", own, 2 * repeat


def _ends(part: LayerPart, rank: RankContext, images: EncodedImages, tp: int) -> Iterator[_Call]:
    """Return what makes patches of pixels, and tokens of patches."""
    patches, tokens = images.num_images * images.num_patches, images.num_tokens
    into, middle = part["projector_in"] or part["hidden"], part["projector_intermediate"]
    repeat = part["num_projectors"]
    yield "patches", "gemm", {"m": patches, "n": part["hidden"], "k": part["patch_features"]}, 1
    if not middle:
        yield "projector", "gemm", {"m": tokens, "n": rank.model.hidden, "k": into}, repeat
        return
    inner = -(-middle // tp)
    yield "projector_up", "gemm", {"m": tokens, "n": inner, "k": into}, repeat
    yield "projector_activation", "gelu", {"num_tokens": tokens, "intermediate": inner}, repeat
    yield "projector_down", "gemm", {"m": tokens, "n": rank.model.hidden, "k": inner}, repeat
