"""Cut a model to the shapes of one tensor-parallel rank, as Megatron and vLLM cut it.

Projections into heads and into the MLP lose output features, those out of them input features.
Norms, routers, embedding and head stay whole. Nothing communicates: these are the shapes of one
rank, not its program.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# Names that models give these layers. Source: the modelling files of transformers 4.57 and 5.
_COLUMNS = frozenset(
    [
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "query_key_value",
        "c_attn",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "dense_h_to_4h",
        "c_fc",
        "fc1",
        "w1",
        "w3",
        "fc_in",
    ]
)
_ROWS = frozenset(
    ["o_proj", "out_proj", "dense", "c_proj", "down_proj", "dense_4h_to_h", "fc2", "w2", "fc_out"]
)
# Experts kept in one tensor, [experts, out, in]: the dimension that is cut.
_EXPERT_TENSORS = {"gate_up_proj": 1, "down_proj": 2, "up_proj": 1, "gate_proj": 1}
# What attention modules remember of their heads and widths.
_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "split_size",
)
_CONFIG_COUNTS = ("num_attention_heads", "num_key_value_heads")


class SplitError(Exception):
    """The model cannot be cut into that many equal ranks; the message says what stands against."""


def split_model(model: nn.Module, config: Any, num_ranks: int) -> None:
    """Cut the layers of a model to the share of one of `num_ranks` ranks, in place.

    The model's tensors are on the meta device.

    Raises:
        SplitError: something does not divide evenly.

    """
    if num_ranks == 1:
        return
    _check_heads(config, num_ranks)
    num_cut = sum(_cut(parent, name, child, num_ranks) for parent, name, child in _linears(model))
    if not num_cut:
        raise SplitError("no layer has a name that says how to split it")
    for module in model.modules():
        if type(module).__name__.endswith(("Experts", "ExpertsInterface")):
            _cut_experts(module, num_ranks)
        if type(module).__name__.endswith("Attention"):
            _cut_attention(module, num_ranks)


def _check_heads(config: Any, num_ranks: int) -> None:
    for name in _CONFIG_COUNTS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count % num_ranks:
            raise SplitError(f"{name} {count} does not divide by {num_ranks}")


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            # Not the head, nor a projection of the embedding, which are outside the layers.
            if "." in path and (name in _COLUMNS or name in _ROWS):
                yield parent, name, child


def _cut(parent: nn.Module, name: str, child: nn.Module, num_ranks: int) -> bool:
    weight = getattr(child, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:  # noqa: PLR2004 - a matrix
        return False
    is_conv = type(child).__name__ == "Conv1D"
    rows, columns = weight.shape
    num_out, num_in = (columns, rows) if is_conv else (rows, columns)
    if name in _COLUMNS:
        num_out = _divide(num_out, num_ranks, f"{name} output features")
    else:
        num_in = _divide(num_in, num_ranks, f"{name} input features")
    cut = copy.copy(child)
    cut._parameters = dict(child._parameters)  # noqa: SLF001 - a shallow copy shares them
    shape = (num_in, num_out) if is_conv else (num_out, num_in)
    cut.weight = nn.Parameter(weight.new_empty(shape))
    bias = getattr(child, "bias", None)
    if isinstance(bias, torch.Tensor):
        cut.bias = nn.Parameter(bias.new_empty(num_out))
    for key, value in (("out_features", num_out), ("in_features", num_in), ("nf", num_out)):
        if hasattr(cut, key):
            setattr(cut, key, value)
    setattr(parent, name, cut)
    return True


def _cut_experts(module: nn.Module, num_ranks: int) -> None:
    tensors = dict(module.named_parameters(recurse=False))
    if any(tensor.dim() != 3 for name, tensor in tensors.items() if name in _EXPERT_TENSORS):  # noqa: PLR2004
        raise SplitError(f"{type(module).__name__} keeps its experts in a form not known here")
    if getattr(module, "is_transposed", False) or set(tensors) - set(_EXPERT_TENSORS):
        raise SplitError(f"{type(module).__name__} keeps its experts in a form not known here")
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        cut = _EXPERT_TENSORS[name]
        shape[cut] = _divide(shape[cut], num_ranks, f"experts' {name}")
        setattr(module, name, nn.Parameter(tensor.new_empty(shape)))


def _cut_attention(module: nn.Module, num_ranks: int) -> None:
    for name in _COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int):
            setattr(module, name, _divide(count, num_ranks, name))
    config = getattr(module, "config", None)
    if config is None:
        return
    cut = copy.copy(config)
    head_dim = getattr(module, "head_dim", None)
    for name in _CONFIG_COUNTS:
        count = getattr(config, name, None)
        if isinstance(count, int):
            setattr(cut, name, count // num_ranks)
    if isinstance(head_dim, int) and hasattr(cut, "head_dim"):
        # Some compute it, from numbers that do not change.
        with contextlib.suppress(AttributeError):
            cut.head_dim = head_dim
    module.config = cut


def _divide(size: int, num_ranks: int, what: str) -> int:
    if size % num_ranks:
        raise SplitError(f"{what} {size} does not divide by {num_ranks}")
    return size // num_ranks
