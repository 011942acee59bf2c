"""Hugging Face files of Inkling: attention with a bias by distance, and short convolutions.

Source: its configuration and modelling files in transformers 5.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, permutations
from math import ceil, log
from operator import mul

from foretoken.domain.models.hf_parts import (
    Fields,
    compose,
    dense_first,
    layers_of,
    mlp_of,
    prediction_heads,
    read_attention,
    read_experts,
    read_trunk,
)
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.layer import LayerPart, every_nth

# What `InklingTextConfig` takes for keys that are left out.
_DEFAULTS = {
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 128,
    "sliding_window_size": 512,
    "d_rel": 16,
    "rel_extent": 1024,
    "conv_kernel_size": 4,
    "n_shared_experts": 2,
    "max_position_embeddings": 131072,
}
# Every so many layers one sees all tokens.
_PERIOD = 6


def read_inkling(reader: ConfigReader) -> Fields:
    """Read Inkling's text model."""
    reader.rename({"model_max_length": "max_position_embeddings"})
    reader.rename(
        {"sconv_kernel_size": "conv_kernel_size", "dense_mlp_idx": "first_k_dense_replace"}
    )
    if reader.has("dense_intermediate_size"):
        # Then the other width is that of experts.
        reader.rename({"intermediate_size": "moe_intermediate_size"})
        reader.rename({"dense_intermediate_size": "intermediate_size"})
    reader.assume(_DEFAULTS)
    num_layers = reader.integer("num_hidden_layers")
    # Rows of the head that are no padding, factors and limits, and what heads of prediction add.
    reader.ignore("unpadded_vocab_size", "log_scaling_n_floor", "log_scaling_alpha", "route_scale")
    reader.ignore("logits_mup_width_multiplier", "rms_norm_eps_moe_gate", "number_of_conv_states")
    reader.ignore("chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids")
    reader.require("shared_expert_sink", default=True, allowed=True)
    local = reader.get("local_layer_ids")
    by_file = every_nth(num_layers, _PERIOD)
    if isinstance(local, list):
        by_file = [layer not in local for layer in range(num_layers)]
    sees_all = layers_of(reader, "hybrid", "hybrid_sliding", by_file)
    full = _attention(reader)
    window = reader.integer("sliding_window_size")
    windowed = full.changed(
        window=window,
        max_distance=window,
        num_heads=reader.integer("swa_num_attention_heads"),
        num_kv_heads=reader.integer("swa_num_key_value_heads"),
        head_dim=reader.integer("swa_head_dim"),
    )
    shared = reader.optional("n_shared_experts", 0)
    width = shared * reader.integer("moe_intermediate_size")
    experts = read_experts(reader, shared_intermediate=width, has_shared_gate=shared)
    halves = dense_first(reader, mlp_of(reader.optional("intermediate_size", 1)), experts)
    mixers = [full if is_full else windowed for is_full in sees_all]
    return {
        **read_trunk(reader),
        **compose(list(zip(mixers, halves, strict=True))),
        "extras": prediction_heads(reader, "num_mtp_layers"),
    }


def _attention(reader: ConfigReader) -> LayerPart:
    """Return the attention of layers that see all tokens."""
    dims = {
        **read_attention(reader, qk_norm=1, has_rope=0).dims,
        "hidden": reader.integer("hidden_size"),
        "distance_dim": reader.integer("d_rel"),
        "max_distance": reader.integer("rel_extent"),
        "conv_kernel": reader.integer("conv_kernel_size"),
    }
    return LayerPart(kind="relative_attention", dims=dims)


def read_inkling_seeing(reader: ConfigReader) -> Fields:
    """Read a file of Inkling with what it sees and hears with."""
    text, heads = reader.section("text_config"), reader.section("mtp_config")
    text.assume({"num_mtp_layers": heads.optional("num_nextn_predict_layers", 0)})
    heads.ignore("chain_hidden_post_norm", "local_layer_ids")
    fields = read_inkling(text)
    extras = fields["extras"]
    if reader.has("vision_config"):
        extras = (*extras, _patches(reader, fields["hidden"]))
    if reader.has("audio_config"):
        sound = reader.part("audio_config")
        rows = sound.optional("n_mel_bins", 80) * sound.optional("mel_vocab_size", 256)
        extras = (*extras, LayerPart(kind="sound_table", dims={"rows": rows}))
    return {**fields, "extras": extras}


def _patches(reader: ConfigReader, hidden: int) -> LayerPart:
    """Return what makes a token of a patch: products of ever larger blocks of its pixels."""
    vision = reader.part("vision_config")
    num_layers = vision.optional("n_layers", vision.optional("num_hidden_layers", 24))
    side, frames = vision.optional("patch_size", 40), vision.optional("temporal_patch_size", 2)
    channels = vision.optional("num_channels", 3)
    scales = _plan_scales(side, frames, channels)
    if len(scales) > _MOST_SCALES:
        reader.refuse("vision_config.patch_size", f"{side} has too many factors")
        scales = [scales[0], scales[-1]]
    steps = _steps_of(scales, num_layers)
    size, num_weights, num_products = side**2 * frames, 0, 0
    for layer, (first, last) in enumerate(pairwise(steps)):
        (blocks, features), (larger, out) = scales[first], scales[last]
        weights = features * (larger // blocks) * (hidden if layer == num_layers - 1 else out)
        num_weights += weights
        num_products += weights * (size // larger)
    return LayerPart(
        kind="summed_encoder",
        dims={
            "num_weights": num_weights,
            "repeats": max(round(num_products / num_weights), 1),
            "patch_side": side,
            "frames": frames,
        },
    )


# More ways to take them than are looked through.
_MOST_SCALES = 8
# Features are rounded up to these many.
_WIDTH_STEP = 64


def _plan_scales(side: int, frames: int, channels: int) -> Sequence[tuple[int, int]]:
    """Return the blocks of a patch that a layer may make, by pixels, with the features of each.

    Source: `plan_out_scales` of its modelling file.
    """
    edges = list(accumulate(_factors(side), mul))
    depths = list(accumulate(_factors(frames), mul))
    spatial = [(edge**2, ceil(edge**2 * channels / _WIDTH_STEP) * _WIDTH_STEP) for edge in edges]
    whole = side**2
    temporal = [(depth * whole, whole * channels * depth * _WIDTH_STEP) for depth in depths]
    return [(1, channels), *spatial, *temporal]


def _steps_of(scales: Sequence[tuple[int, int]], num_layers: int) -> list[int]:
    """Return which scale each layer ends with: near to an even growth, in logarithms.

    Of fewer layers than scales each has another, and all together are as near as they can be.
    """
    longest = log(scales[-1][0] * scales[0][1])
    costs = [
        [abs(longest * layer / num_layers - log(blocks)) for blocks, _ in scales]
        for layer in range(num_layers + 1)
    ]
    places: Sequence[int] = [cost.index(min(cost)) for cost in costs]
    if num_layers < len(scales):
        ways = permutations(range(len(scales)), num_layers + 1)
        places = min(
            ways, key=lambda way: sum(cost[at] for cost, at in zip(costs, way, strict=True))
        )
    return [0, *places[1:-1], len(scales) - 1]


def _factors(number: int) -> Iterator[int]:
    """Yield prime factors, the largest first."""
    factors, rest, divisor = list[int](), number, 2
    while rest > 1:
        while rest % divisor == 0:
            factors.append(divisor)
            rest //= divisor
        divisor += 1
    return iter(reversed(factors))
