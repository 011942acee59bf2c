"""What a `config.json` says, as a configuration that transformers builds models from."""

import copy
import logging
from typing import Any

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.profiling import GraphRequest
from foretoken.profiler.config_json import read_config_json, switch_off_dropout
from foretoken.profiler.kernel import PLAIN_DTYPES


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
    violations = [
        FieldViolation(name, "must be at least 1")
        for name in ("sequence_length", "micro_batch_size_max")
        if getattr(request, name) < 1
    ]
    if request.num_layers < 0:
        violations.append(FieldViolation("num_layers", "must not be negative"))
    if any(tp < 1 for tp in request.tp_sizes):
        violations.append(FieldViolation("tp_sizes", "must be at least 1"))
    if request.dtype not in PLAIN_DTYPES:
        names = ", ".join(sorted(dtype.name.lower() for dtype in PLAIN_DTYPES))
        violations.append(FieldViolation("dtype", f"a model is built in one of {names}"))
    if not request.time_cap_s >= 0:
        violations.append(FieldViolation("time_cap_s", "must not be negative"))
    if violations:
        raise InvalidRequestError.of_violations(violations, "graph profile")
