"""What a Hugging Face `config.json` says of a model that is built with random weights."""

from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.text_file import parse_json

# What says how a checkpoint was stored, or would have code fetched: neither has a bearing on a
# model with random weights.
_LEFT_OUT = (
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)
_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "hidden_dropout",
    "layerdrop",
    "resid_pdrop",
)


def read_config_json(config_json: str) -> dict[str, Any]:
    """Return the content of a `config.json` without what concerns a stored checkpoint.

    Raises:
        InvalidRequestError: it is no JSON object.

    """
    content = parse_json(config_json, "config_json")
    if not isinstance(content, dict):
        raise InvalidRequestError.of_field("config_json", "holds no JSON object")
    return {key: value for key, value in content.items() if key not in _LEFT_OUT}


def switch_off_dropout(config: Any) -> None:
    """Let a model of this configuration drop nothing, as when it serves or is timed."""
    for name in _DROPOUTS:
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, 0.0)
