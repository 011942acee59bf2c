"""Build a model with random weights from its configuration, whole or the share of one rank."""

import copy
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foretoken.domain.errors import Checks, InvalidRequestError, at_least
from foretoken.domain.measurements.profiling import GraphRequest
from foretoken.profiler.config_json import read_config_json, switch_off_dropout
from foretoken.profiler.graph.module_fold import layer_in_path
from foretoken.profiler.graph.tensor_split import split_model
from foretoken.profiler.kernel import PLAIN_DTYPES, TensorFactory


def read_model_config(request: GraphRequest) -> Any:
    """Return the `PretrainedConfig` of a request, without dropout and caches.

    Raises:
        InvalidRequestError: the request cannot be met, transformers is not installed, or does not
            know the type of the model.

    """
    _check_request(request)
    content = read_config_json(request.config_json)
    model_type = content.pop("model_type", None)
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as err:
        raise InvalidRequestError(
            "graphs of models need the package transformers: pip install 'foretoken[graphs]'"
        ) from err
    # Its warnings are of generation and checkpoints.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise InvalidRequestError.of_field(
            "config_json",
            f"model_type {model_type!r} is not one that transformers {transformers.__version__}"
            " can build; code that a repository brings is not run",
        )
    try:
        config = transformers.AutoConfig.for_model(model_type, **content)
    except (TypeError, ValueError, KeyError, AttributeError) as err:
        raise InvalidRequestError.of_field("config_json", f"{request.model}: {err}") from err
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:  # noqa: SLF001
        raise InvalidRequestError.of_field("config_json", f"{model_type} is no causal LM")
    switch_off_dropout(config)
    config.use_cache = False
    num_layers = count_layers(config)
    if request.num_layers > num_layers:
        reason = f"{request.model} has {num_layers} layers"
        raise InvalidRequestError.of_field("num_layers", reason)
    return config


def count_layers(config: Any) -> int:
    """Return the number of layers of a configuration.

    Raises:
        InvalidRequestError: it does not say.

    """
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        raise InvalidRequestError.of_field("config_json", "says no number of layers")
    return count


def shorten(config: Any, num_layers: int) -> Any:
    """Return the configuration of a model that has only the first layers."""
    shortened = copy.deepcopy(config)
    before = count_layers(config)
    for name, value in vars(config).items():
        # What is said of each layer: its kind of attention, whether it has experts.
        if isinstance(value, list) and len(value) == before:
            setattr(shortened, name, value[:num_layers])
    shortened.num_hidden_layers = num_layers
    return shortened


def lengthen_positions(config: Any, sequence_length: int) -> str:
    """Let a model take sequences of that length; return what had to change (empty: nothing)."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest >= sequence_length:
        return ""
    config.max_position_embeddings = sequence_length
    return f"sequences of {sequence_length} tokens are longer than the model's {longest} positions"


def _check_request(request: GraphRequest) -> None:
    names = ", ".join(sorted(dtype.name.lower() for dtype in PLAIN_DTYPES))
    checks: Checks = {
        **at_least(request, 1, "sequence_length", "micro_batch_size_max"),
        **at_least(request, 0, "num_layers", "time_cap_s"),
        "tp_sizes": (all(tp >= 1 for tp in request.tp_sizes), "must be at least 1"),
        "dtype": (request.dtype in PLAIN_DTYPES, f"a model is built in one of {names}"),
    }
    InvalidRequestError.check("graph profile", checks)


def layer_kinds(model: nn.Module) -> tuple[object, ...]:
    """Return for each layer what tells its kind from others: its modules and their weights."""
    found: dict[int, list[object]] = defaultdict(list)
    for path, module in model.named_modules():
        layer, inner = layer_in_path(path)
        if layer >= 0:
            kind = getattr(module, "layer_type", None) or getattr(module, "sliding_window", None)
            found[layer].append((inner, type(module).__name__, kind))
    for path, parameter in model.named_parameters():
        layer, inner = layer_in_path(path)
        if layer >= 0:
            found[layer].append((inner, tuple(parameter.shape)))
    return tuple(tuple(found[layer]) for layer in sorted(found))


# transformers builds masks where it is traced that it leaves out where it runs.
CAUSAL_ATTENTION = "foretoken_causal"
# As models are initialised: far from overflow after many layers.
_WEIGHT_SPREAD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What of a model is built: its first layers, cut for one of `num_ranks` ranks."""

    config: Any
    num_layers: int
    num_ranks: int
    dtype: torch.dtype


def outline_model(shape: ModelShape, name: str) -> nn.Module:
    """Return the model on the meta device, where it takes no memory.

    Raises:
        InvalidRequestError: transformers cannot build it.
        SplitError: it cannot be split over that many ranks.

    """
    from transformers import AutoModelForCausalLM

    _register_attention()
    config = shorten(shape.config, shape.num_layers)
    failures = []
    # SDPA cannot cap scores; models that bias them do not have it either.
    is_capped = bool(getattr(config, "attn_logit_softcapping", None))
    for attention in ("eager",) if is_capped else (CAUSAL_ATTENTION, "eager"):
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=shape.dtype, attn_implementation=attention
                )
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as err:
            failures.append(str(err).splitlines()[0] if str(err) else repr(err))
            continue
        if attention == CAUSAL_ATTENTION and not getattr(model, "_supports_sdpa", False):
            continue
        model.eval()
        split_model(model, config, shape.num_ranks)
        return model
    raise InvalidRequestError.of_field("config_json", f"{name}: {failures[0]}")


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; those shared count once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def place_model(model: nn.Module, tensors: TensorFactory) -> nn.Module:
    """Return the model on the device of `tensors` with random weights.

    Buffers are random, too: positive numbers below 1 as frequencies of rotations are.
    """
    placed = model.to_empty(device=tensors.device)
    placed.tie_weights()
    with torch.no_grad():
        for parameter in placed.parameters():
            parameter.copy_(tensors.random(*parameter.shape)).mul_(_WEIGHT_SPREAD)
        for buffer in placed.buffers():
            if buffer.is_floating_point():
                buffer.copy_(tensors.random(*buffer.shape)).sigmoid_()
            else:
                buffer.zero_()
    return placed


def _register_attention() -> None:
    """Offer transformers an attention that is its SDPA, and whose mask is left out when traced.

    `scaled_dot_product_attention` is given that it is causal instead, as in a run of the model.
    A window shorter than the sequence keeps its mask.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    def make_mask(
        *args: Any, kv_length: int = 0, local_size: int | None = None, **facts: Any
    ) -> torch.Tensor | None:
        if local_size is None or kv_length < local_size:
            return None
        mask: torch.Tensor | None = sdpa_mask(
            *args, kv_length=kv_length, local_size=local_size, **facts
        )
        return mask

    AttentionInterface.register(CAUSAL_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(CAUSAL_ATTENTION, make_mask)
