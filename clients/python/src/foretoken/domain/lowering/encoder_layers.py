"""What the layers of encoders compute, those of images and of both kinds of sound."""

from collections.abc import Iterator, Mapping

from foretoken.domain.models.image import EncodedImages
from foretoken.domain.models.layer import LayerPart

# A role, its operator, dimensions and how often it runs.
Call = tuple[str, str, Mapping[str, float], int]


def list_layer_calls(part: LayerPart, sizes: tuple[int, int], tp: int) -> Iterator[Call]:
    """Return the operators of the layers; `sizes` are all patches, and images."""
    tokens, num_images = sizes
    hidden, repeat = part["hidden"], part["num_layers"]
    width = part.dims.get("attention_width") or hidden
    heads, inner = part["num_heads"] // tp, -(-part["intermediate"] // tp)
    own = {"num_tokens": tokens, "hidden": hidden}
    attention = {
        "num_seqs": num_images,
        "num_tokens": tokens,
        "score_pairs": tokens * (tokens // num_images),
        "num_heads": heads,
        "head_dim": width // part["num_heads"],
    }
    is_gated = part.dims.get("is_gated", 0)
    norm = "rms_norm" if is_gated else "layer_norm"
    activation = "silu_mul" if is_gated else "gelu"
    up = (1 + is_gated) * inner
    yield "norm", norm, own, 2 * repeat
    yield "qkv_proj", "gemm", {"m": tokens, "n": 3 * width // tp, "k": hidden}, repeat
    yield "attention", "encoder_attention", attention, repeat
    yield "out_proj", "gemm", {"m": tokens, "n": hidden, "k": width // tp}, repeat
    yield "up_proj", "gemm", {"m": tokens, "n": up, "k": hidden}, repeat
    yield "activation", activation, {"num_tokens": tokens, "intermediate": inner}, repeat
    yield "down_proj", "gemm", {"m": tokens, "n": hidden, "k": inner}, repeat
    yield "residual", "residual_add", own, 2 * repeat


def list_speech_ends(part: LayerPart, width: int, images: EncodedImages, tp: int) -> Iterator[Call]:
    """Return the convolutions before Whisper's layers, as products, and the projector."""
    frames, hidden = images.num_images * images.num_patches, part["hidden"]
    tokens = images.num_tokens
    # The first has two frames for each of the second, which has a stride of two.
    yield "frames", "gemm", {"m": 2 * frames, "n": hidden, "k": 3 * part["mel_bins"]}, 1
    yield "halved_frames", "gemm", {"m": frames, "n": hidden, "k": 3 * hidden}, 1
    into, middle = part["projector_in"], part["projector_intermediate"]
    if not middle:
        yield "projector", "gemm", {"m": tokens, "n": width, "k": into}, 1
        return
    inner = -(-middle // tp)
    yield "projector_up", "gemm", {"m": tokens, "n": inner, "k": into}, 1
    yield "projector_activation", "gelu", {"num_tokens": tokens, "intermediate": inner}, 1
    yield "projector_down", "gemm", {"m": tokens, "n": width, "k": inner}, 1


# Around each half of an MLP, attention and the convolution, and at the end of a layer.
_NORMS_OF_LAYER, _LAYER_NORMS_OF_LAYER, _RESIDUALS_OF_LAYER = 9, 5, 4


def list_conformer_calls(part: LayerPart, width: int, images: EncodedImages) -> list[Call]:
    """Return the layers of a conformer, and the products around them.

    Attention goes by chunks, each to what is around it. Source: the modelling files of Gemma 4 and
    Granite Speech in transformers 5.
    """
    frames, hidden, repeat = (
        images.num_images * images.num_patches,
        part["hidden"],
        part["num_layers"],
    )
    inner, convolved = part["intermediate"] or 4 * hidden, part["conv_width"] or hidden
    own = {"num_tokens": frames, "hidden": hidden}
    chunks = images.num_images * -(-images.num_patches // part["chunk"])
    attention = {
        "num_seqs": chunks,
        "num_tokens": frames,
        "score_pairs": chunks * part["chunk"] * part["context"],
        "num_heads": part["num_heads"],
        "head_dim": hidden // part["num_heads"],
    }

    def product(n: int, k: int) -> Mapping[str, float]:
        return {"m": frames, "n": n, "k": k}

    channels = {"num_seqs": images.num_images, "num_tokens": frames, "channels": convolved}
    norms = _NORMS_OF_LAYER if not part["num_positions"] else _LAYER_NORMS_OF_LAYER
    norm = "layer_norm" if part["num_positions"] else "rms_norm"
    return [
        ("frames", "gemm", product(hidden, part["sampled_features"]), 1),
        ("norm", norm, own, norms * repeat),
        ("up_proj", "gemm", product(inner, hidden), 2 * repeat),
        ("activation", "silu", {"num_tokens": frames, "intermediate": inner}, 2 * repeat),
        ("down_proj", "gemm", product(hidden, inner), 2 * repeat),
        ("qkv_proj", "gemm", product(3 * hidden, hidden), repeat),
        ("attention", "encoder_attention", attention, repeat),
        ("out_proj", "gemm", product(hidden, hidden), repeat),
        ("gate_proj", "gemm", product(2 * convolved, hidden), repeat),
        ("gate", "silu_mul", {"num_tokens": frames, "intermediate": convolved}, repeat),
        (
            "convolution",
            "causal_conv_prefill",
            {**channels, "kernel_size": part["conv_kernel"]},
            repeat,
        ),
        ("convolved_proj", "gemm", product(hidden, convolved), repeat),
        ("residual", "residual_add", own, _RESIDUALS_OF_LAYER * repeat),
        *_conformer_ends(part, width, images),
    ]


def _conformer_ends(part: LayerPart, width: int, images: EncodedImages) -> Iterator[Call]:
    """Return what makes tokens of frames: products, or queries that attend to windows of them."""
    frames, tokens = images.num_images * images.num_patches, images.num_tokens
    hidden, output = part["hidden"], part["output"] or part["hidden"]
    if part["output"]:
        yield "output", "gemm", {"m": frames, "n": output, "k": hidden}, 1
    if repeat := part["query_layers"]:
        yield from _query_calls(part, images, repeat)
    yield "projector", "gemm", {"m": tokens, "n": width, "k": output}, 1


def _query_calls(part: LayerPart, images: EncodedImages, repeat: int) -> Iterator[Call]:
    """Return the layers of queries: they attend to each other, then to the frames of a window."""
    tokens, hidden, inner = images.num_tokens, part["hidden"], part["query_intermediate"]
    each, window = part["window_queries"], part["query_window"]
    windows = tokens // each
    heads = {"num_heads": part["query_heads"], "head_dim": hidden // part["query_heads"]}
    own = {"num_seqs": windows, "num_tokens": tokens, "score_pairs": tokens * each, **heads}
    seen = {**own, "score_pairs": tokens * window}
    of_frames = {"m": windows * window, "n": 2 * hidden, "k": hidden}
    square = {"m": tokens, "n": hidden, "k": hidden}
    yield "query_qkv_proj", "gemm", {**square, "n": 3 * hidden}, repeat
    yield "query_attention", "encoder_attention", own, repeat
    yield "query_out_proj", "gemm", square, 3 * repeat  # with both of the attention to frames
    yield "query_frames_proj", "gemm", of_frames, repeat
    yield "query_frames_attention", "encoder_attention", seen, repeat
    yield "query_up_proj", "gemm", {**square, "n": inner}, repeat
    yield "query_activation", "gelu", {"num_tokens": tokens, "intermediate": inner}, repeat
    yield "query_down_proj", "gemm", {**square, "k": inner}, repeat
    yield "query_norm", "layer_norm", {"num_tokens": tokens, "hidden": hidden}, 3 * repeat
