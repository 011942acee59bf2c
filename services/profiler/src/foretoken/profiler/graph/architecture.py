"""Read what a built model is made of: its layers as kinds in a pattern.

A configuration says what its family means by its keys; modules and their weights say it of every
family that transformers can build. Kinds are known by the names that modelling files share (as in
`module_fold.py`), sizes by the shapes of weights. The parameters that come of it are held against
those of the model, so that a module that nobody knows is no silent loss.
Source: the modelling files of transformers 5.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.layer import LayerKind, LayerPart, write_pattern
from foretoken.domain.models.parameters import count_parameters
from foretoken.profiler.graph.module_fold import layer_in_path

# Names of matrices, the first that a layer has.
_QUERY, _KEY, _VALUE = ("q_proj",), ("k_proj",), ("v_proj",)
_FUSED = ("qkv_proj", "query_key_value", "Wqkv", "attn.c_attn", "in_proj_qkv")
_OUT = ("o_proj", "out_proj", "attn.c_proj", "attention.dense", "self_attn.dense")
_GATE_UP = ("gate_up_proj",)
_UP = ("up_proj", "fc1", "c_fc", "dense_h_to_4h", "fc_in")
_DOWN = ("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h", "fc_out")
_SHARED = re.compile(r"shared_experts?\.")
# How many parameters may be left out: decays, sinks and biases of routers.
_COUNT_TOLERANCE = 0.005


@dataclass(frozen=True, slots=True)
class _Layer:
    """The modules and weights of a layer, by their paths in it; and the model's configuration."""

    modules: Mapping[str, nn.Module]
    weights: Mapping[str, tuple[int, ...]]
    config: Any
    hidden: int
    has_rope: bool

    def find(self, names: tuple[str, ...], suffix: str = ".weight") -> tuple[int, ...] | None:
        """Return the shape of the first weight of these names outside of experts, if any."""
        for name in names:
            for path, shape in self.weights.items():
                if "expert" not in path and f".{path}".endswith(f".{name}{suffix}"):
                    return shape
        return None

    def width(self, names: tuple[str, ...]) -> int:
        """Return the features of a matrix on its other side than the model's; 0 without it."""
        shape = self.find(names)
        if shape is None:
            return 0
        return shape[0] * shape[1] // self.hidden

    def owner(self, *attributes: str) -> nn.Module | None:
        """Return the first module with all of these attributes."""
        found = self.modules.values()
        return next((item for item in found if all(hasattr(item, a) for a in attributes)), None)


def read_architecture(model: nn.Module, config: Any, name: str) -> ModelArchitecture:
    """Return the layers of a causal language model, whole and on one rank, by kind.

    Raises:
        InvalidRequestError: a layer has modules that are of no kind, or the kinds that were found
            have not as many parameters as the model.

    """
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    vocab, hidden = embedding.shape
    positions = _learned_positions(model)
    layers = _layers(model, config, int(hidden))
    if getattr(config, "use_parallel_residual", False) or not all(map(_has_two_norms, layers)):
        problem = f"{name}: attention and MLP run next to each other, which no pattern has"
        raise InvalidRequestError.of_field("config_json", problem)
    halves = [(_mixer(layer), _feed_forward(layer)) for layer in layers]
    kinds = {pair: f"kind-{number}" for number, pair in enumerate(dict.fromkeys(halves))}
    is_classic = any(isinstance(module, nn.LayerNorm) for module in model.modules())
    architecture = ModelArchitecture(
        name=name,
        hidden=int(hidden),
        vocab=int(vocab),
        max_position=positions or int(getattr(config, "max_position_embeddings", None) or 1),
        position="learned" if positions else "rope",
        norm="layer_norm" if is_classic else "rms_norm",
        has_tied_embedding=head is None or head.weight is embedding,
        layers=tuple(
            LayerKind(name=kind, mixer=mixer, feed_forward=half)
            for (mixer, half), kind in kinds.items()
        ),
        pattern=write_pattern([kinds[pair] for pair in halves]),
    )
    held = sum(parameter.numel() for parameter in model.parameters())
    counted = count_parameters(architecture).total
    if abs(held - counted) > _COUNT_TOLERANCE * held:
        problem = f"its modules hold {held:,} parameters, and the kinds they look like {counted:,}"
        raise InvalidRequestError.of_field("config_json", f"{name}: {problem}")
    return architecture


def _learned_positions(model: nn.Module) -> int:
    """Return the rows of a table of positions, 0 without one."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    words = model.get_input_embeddings()
    return next((table.num_embeddings for table in tables if table is not words), 0)


def _has_two_norms(layer: _Layer) -> bool:
    """Tell whether each half of a layer has a norm of its own."""
    num_halves = (_mixer(layer) is not None) + (_feed_forward(layer) is not None)
    norms = {path.split(".")[0] for path in layer.weights if re.match(r"[^.]*(norm|ln_)", path)}
    return len(norms) >= num_halves


def _layers(model: nn.Module, config: Any, hidden: int) -> list[_Layer]:
    modules: defaultdict[int, dict[str, nn.Module]] = defaultdict(dict)
    weights: defaultdict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for path, module in model.named_modules():
        layer, inner = layer_in_path(path)
        modules[layer][inner] = module
    for path, parameter in model.named_parameters():
        layer, inner = layer_in_path(path)
        weights[layer][inner] = tuple(parameter.shape)
    has_rope = any("Rotary" in type(module).__name__ for module in model.modules())
    return [
        _Layer(modules[at], weights[at], config, hidden, has_rope)
        for at in sorted(modules)
        if at >= 0
    ]


def _mixer(layer: _Layer) -> LayerPart | None:
    for read in (_latent, _gated_delta, _mamba2, _attention):
        if (part := read(layer)) is not None:
            return part
    return None


def _dims(module: nn.Module, names: Mapping[str, str]) -> dict[str, int]:
    return {dim: int(getattr(module, name) or 0) for dim, name in names.items()}


def _latent(layer: _Layer) -> LayerPart | None:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_heads")
    module = layer.owner(*names)
    if module is None:
        return None
    own = _dims(module, {**{name: name for name in names}, "q_lora_rank": "q_lora_rank"})
    return LayerPart(kind="latent", dims=own)


def _gated_delta(layer: _Layer) -> LayerPart | None:
    names = {
        "num_key_heads": "num_k_heads",
        "key_head_dim": "head_k_dim",
        "num_value_heads": "num_v_heads",
        "value_head_dim": "head_v_dim",
        "conv_kernel": "conv_kernel_size",
    }
    module = layer.owner(*names.values())
    return LayerPart(kind="gated_delta", dims=_dims(module, names)) if module else None


def _mamba2(layer: _Layer) -> LayerPart | None:
    names = {
        "num_heads": "num_heads",
        "head_dim": "head_dim",
        "state_dim": "ssm_state_size",
        "num_groups": "n_groups",
        "conv_kernel": "conv_kernel_size",
    }
    module = layer.owner(*names.values())
    return LayerPart(kind="mamba2", dims=_dims(module, names)) if module else None


def _attention(layer: _Layer) -> LayerPart | None:
    out_width, queries = layer.width(_OUT), layer.width(_QUERY)
    if not out_width:
        return None
    keys, values, fused = layer.width(_KEY), layer.width(_VALUE), layer.width(_FUSED)
    head_dim = _head_dim(layer, out_width)
    if not queries:
        queries, keys, values = out_width, (fused - out_width) // 2, (fused - out_width) // 2
    num_heads = out_width // head_dim
    norm = layer.find(("q_norm", "q_layernorm", "query_layernorm"))
    window = next(
        (
            getattr(module, "sliding_window", None)
            for path, module in layer.modules.items()
            if hasattr(module, "sliding_window") and path
        ),
        None,
    )
    dims = {
        "num_heads": num_heads,
        "num_kv_heads": keys // head_dim,
        "head_dim": head_dim,
        "window": int(window or 0),
        "has_rope": int(layer.has_rope),
        "has_qkv_bias": int(layer.find((*_QUERY, *_FUSED), ".bias") is not None),
        "has_out_bias": int(layer.find(_OUT, ".bias") is not None),
        "qk_norm": 0 if norm is None else 1 if norm[0] == head_dim else 2,
        # A product twice as wide as the output has the output's gate.
        "gate": int(queries == 2 * out_width),
        "has_value_of_key": int(not values),
        "has_sinks": int(layer.find(("sinks",), "") is not None),
    }
    return LayerPart(kind="attention", dims=dims)


def _head_dim(layer: _Layer, out_width: int) -> int:
    for module in layer.modules.values():
        for name in ("head_dim", "head_size"):
            if isinstance(size := getattr(module, name, None), int) and size > 0:
                return size
    return out_width // int(layer.config.num_attention_heads)


def _feed_forward(layer: _Layer) -> LayerPart | None:
    experts = [path for path in layer.weights if "experts." in path and not _SHARED.search(path)]
    if experts:
        return _experts(layer, experts)
    down = layer.width(_DOWN)
    if not down:
        return None
    is_gated = bool(layer.width(("gate_proj",)) or layer.width(_GATE_UP))
    has_bias = layer.find((*_UP, *_GATE_UP), ".bias") is not None
    dims = {"intermediate": down, "is_gated": int(is_gated), "has_bias": int(has_bias)}
    return LayerPart(kind="mlp", dims=dims)


def _experts(layer: _Layer, paths: list[str]) -> LayerPart:
    """Return experts whose matrices are in one weight for all of them."""
    down = next((layer.weights[p] for p in paths if p.endswith("experts.down_proj")), None)
    if down is None or layer.hidden not in down[1:]:
        raise InvalidRequestError.of_field("config_json", f"experts of {paths[0]} are of no kind")
    intermediate = down[1] * down[2] // layer.hidden
    shared = [
        shape[0] * shape[1] // layer.hidden
        for path, shape in layer.weights.items()
        if _SHARED.search(path) and path.endswith("down_proj.weight")
    ]
    dims = {
        "num_experts": down[0],
        "top_k": int(layer.config.num_experts_per_tok),
        "intermediate": intermediate,
        "shared_intermediate": sum(shared),
        "is_gated": int(any(path.endswith("experts.gate_up_proj") for path in paths)),
        "has_bias": int(any(path.endswith("experts.down_proj_bias") for path in paths)),
        "has_shared_gate": int(any("shared_expert_gate" in path for path in layer.weights)),
    }
    return LayerPart(kind="experts", dims=dims)
