"""Build a model with random weights from its configuration, whole or the share of one rank."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.graph.model_config import shorten
from foretoken.profiler.graph.tensor_split import split_model
from foretoken.profiler.kernel import TensorFactory

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
