"""What a model requests when `transformers` runs it on one device, as steps are validated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.eager import ModelForm, lower_step
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.profiler.closure.hf_config import config_of_architecture

_ACTIVATION_KEYS = ("hidden_act", "activation_function")
# The context of decoding sequences: with the new token a power of two, as engines are asked about.
_CONTEXT_TOKENS = 1023


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerGrid:
    """Prompts of one sequence, by their tokens, and decoding steps, by their sequences."""

    prefill_tokens: tuple[int, ...]
    decode_seqs: tuple[int, ...]


def eager_nodes(
    grid: EagerGrid,
    micro_batches: Sequence[tuple[int, int]],
    num_params: Sequence[int],
    model: ModelArchitecture,
    dtype: DType,
) -> Iterator[OperatorNode]:
    """Yield the operators of forward steps of a grid, and of training on these micro batches.

    The optimizer's update comes for as many parameters as `num_params` say, each cut into as many
    tensors as the model has: all of a large model's would not fit a device.
    """
    form = _form_of(model)
    longest = model.max_position
    steps = [("prefill", 1, tokens) for tokens in grid.prefill_tokens if tokens <= longest]
    steps += [("decode", seqs, min(_CONTEXT_TOKENS, longest - 1)) for seqs in grid.decode_seqs]
    steps += [("training", seqs, tokens) for seqs, tokens in micro_batches]
    updates: dict[int, OperatorNode] = {}
    for kind, batch_size, num_tokens in steps:
        step = ClosureStep(kind=kind, batch_size=batch_size, num_tokens=num_tokens)
        for node in lower_step(step, model, dtype, form):
            if node.operator != "fused_adam":
                yield node
                continue
            for size in num_params:
                dims = {**node.dims, "num_params": size}
                updates[size] = replace(node, dims=dims)
    yield from (node for size, node in updates.items() if size >= node.dims["num_tensors"])


def _form_of(model: ModelArchitecture) -> ModelForm:
    """Return how `transformers` runs an architecture: as the model type it would be built as."""
    try:
        content = config_of_architecture(model)
    except InvalidRequestError:
        return ModelForm()
    activation = next((str(content[key]) for key in _ACTIVATION_KEYS if key in content), "")
    return ModelForm(model_type=str(content["model_type"]), activation=activation)
