"""Read a model's architecture from its Hugging Face `config.json`.

Each model type is one function in `_READERS` that says which keys it has and what they mean. Keys
of training, tokens and numerics are ignored; a key that changes the operators and is not understood
is an error, so that no model is simulated as another one: those of `_STRUCTURAL`, unless the reader
of the model type looked at them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.models.architecture import MlaSpec, ModelArchitecture, MoeSpec
from foretoken.domain.models.checkpoint_format import read_checkpoint_format
from foretoken.domain.text_file import is_there, read_json

# Constructor arguments of a ModelArchitecture.
_Fields = dict[str, Any]

# Far above any count or width of a model, and small enough to be reckoned with.
_MAX_SIZE = 2**31 - 1

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
}


# What Qwen2Config of transformers takes where its keys are missing.
_QWEN_WINDOW, _QWEN_WINDOW_LAYERS = 4096, 28

_WINDOW_KEYS = ("sliding_window", "max_window_layers")
# Keys of some models that change which operators run, or how much they do.
_STRUCTURAL = (
    # experts
    *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk"),
    *("moe_intermediate_size", "n_shared_experts", "num_shared_experts"),
    *("shared_expert_intermediate_size", "moe_layer_freq", "decoder_sparse_step"),
    *("mlp_only_layers", "first_k_dense_replace", "moe_layers"),
    # windows, chunks and layers that differ
    *_WINDOW_KEYS,
    *("use_sliding_window", "layer_types", "sliding_window_pattern", "attention_chunk_size"),
    *("full_attention_interval", "no_rope_layers", "cross_attention_layers"),
    # latent attention, norms of heads, biases
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("qk_layernorm", "qk_norm", "use_qk_norm", "attention_bias", "mlp_bias", "qkv_bias"),
    # state-space layers mixed with attention
    *("ssm_cfg", "mamba_d_state", "attn_layer_indices", "linear_num_value_heads"),
)


def architecture_of_hf_config(
    config: Mapping[str, Any], name: str, modelopt: object = None
) -> ModelArchitecture:
    """Return the architecture that a parsed `config.json` describes.

    `modelopt` is the parsed `hf_quant_config.json` next to it, None without one.

    Raises:
        InvalidRequestError: its model type is not supported, a key is missing or has a value that
            cannot be simulated; with one violation per key.
        UnknownPluginError: its weights are stored in a scheme there is not.

    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        supported = ", ".join(sorted(_READERS))
        raise InvalidRequestError.of_field(
            "model_type", f"{model_type!r} of {name} is not supported; supported are {supported}"
        )
    reader = _ConfigReader(config)
    fields = _READERS[model_type](reader)
    reader.refuse_unread(model_type)
    if reader.violations:
        raise InvalidRequestError.of_violations(reader.violations, f"{model_type} config of {name}")
    stored = read_checkpoint_format(config, _parts(**fields), modelopt)
    return ModelArchitecture(
        name=name, quantization=stored.quantization, kv_dtype=stored.kv_dtype, **fields
    )


def _parts(
    num_layers: int, moe: MoeSpec | None = None, mla: MlaSpec | None = None, **_: object
) -> Mapping[str, range]:
    """Return the layers that have each part that a checkpoint may store in its own way."""
    num_dense = moe.num_dense_layers if moe else num_layers
    routed = range(num_dense, num_layers)
    return {
        "latent" if mla else "attention": range(num_layers),
        "mlp": range(num_dense),
        "shared_experts": routed if moe and moe.num_shared_experts else range(0),
        "experts": routed,
    }


def load_hf_config(path: Path) -> ModelArchitecture:
    """Read a `config.json`, or the one in a folder; the model is named after the folder.

    How its weights are stored is read from it, or from the `hf_quant_config.json` next to it.

    Raises:
        InvalidRequestError: no such file, not JSON, or not a model that can be simulated.

    """
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, "model")
    if not isinstance(config, Mapping):
        raise InvalidRequestError.of_field("model", f"{file} holds no JSON object")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    beside = file.with_name(file.name.replace("config.json", "hf_quant_config.json"))
    modelopt = read_json(beside, "model") if beside != file and is_there(beside) else None
    return architecture_of_hf_config(config, name, modelopt)


class _ConfigReader:
    """Take typed values from a config and note what is wrong with it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()
        self.violations: list[FieldViolation] = []

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of a key, which counts as looked at."""
        self._read.add(key)
        return self._config.get(key, default)

    def integer(self, key: str, *other_keys: str) -> int:
        """Return the first of the keys that is there, at least 1; 1 and a violation otherwise."""
        for candidate in (key, *other_keys):
            if self.get(candidate) is not None:
                value = self.optional(candidate, 1)
                if value < 1:
                    self.refuse(candidate, "must be at least 1")
                return max(value, 1)
        self.refuse(key, "required key is missing")
        return 1

    def optional(self, key: str, default: int) -> int:
        """Return the key's value, or the default where it is missing or null."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, f"expected an integer, found {value!r}")
            return default
        if abs(value) > _MAX_SIZE:
            self.refuse(key, f"is more than {_MAX_SIZE:,}")
            return default
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean, or the default where it is missing or null."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, f"expected true or false, found {value!r}")
            return default
        return value

    def activation(self, *keys: str, default: str) -> str:
        """Return the activation that the first present key names."""
        for key in keys:
            value = self.get(key)
            if value is not None:
                if value in _ACTIVATIONS:
                    return _ACTIVATIONS[value]
                self.refuse(key, f"{value!r} is not one of {', '.join(_ACTIVATIONS)}")
        return default

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, an empty one where it is missing or null."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(key, f"expected a list of texts, found {value!r}")
            return []
        return value

    def dense_prefix(self, key: str) -> int:
        """Return how many layers a list of dense layers names: they must be the first ones."""
        layers = self.get(key) or []
        if sorted(layers) != list(range(len(layers))):
            self.refuse(key, "only the first layers can be dense")
        return len(layers)

    def require(self, key: str, default: object, allowed: object) -> None:
        """Refuse a key that has any value but the one that can be simulated."""
        value = self.get(key, default)
        if value != allowed:
            self.refuse(key, f"only {allowed!r} is supported, found {value!r}")

    def refuse_unread(self, model_type: str) -> None:
        """Refuse what changes the operators and was not looked at."""
        for key in _STRUCTURAL:
            value = self._config.get(key)
            if key not in self._read and not self._is_inert(key, value):
                reason = f"{value!r} changes the operators, and is not read of a {model_type} model"
                self.refuse(key, reason)

    def _is_inert(self, key: str, value: object) -> bool:
        """Whether a key leaves the operators as they are without it."""
        if key == "layer_types" and isinstance(value, list):
            return set(value) <= {"full_attention"}
        if key in _WINDOW_KEYS and self._config.get("use_sliding_window") is False:
            return True
        return value in (None, False, 0, "", [])

    def refuse(self, key: str, description: str) -> None:
        """Note what is wrong with a key."""
        self.violations.append(FieldViolation(key, description))


def _decoder(reader: _ConfigReader) -> _Fields:
    """Read the keys that Llama and most of its descendants share."""
    hidden, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if hidden % num_heads and reader.get("head_dim") is None:
        reader.refuse("hidden_size", f"{hidden} is no multiple of the {num_heads} heads")
    return {
        "num_layers": reader.integer("num_hidden_layers"),
        "hidden": hidden,
        "num_heads": num_heads,
        "num_kv_heads": reader.optional("num_key_value_heads", num_heads),
        "head_dim": reader.optional("head_dim", hidden // num_heads),
        "intermediate": reader.integer("intermediate_size"),
        "vocab": reader.integer("vocab_size"),
        "max_position": reader.integer("max_position_embeddings"),
        "activation": reader.activation("hidden_act", default="silu"),
        "has_tied_embedding": reader.flag("tie_word_embeddings", default=False),
    }


def _llama(reader: _ConfigReader) -> _Fields:
    has_bias = reader.flag("mlp_bias", default=False)
    has_attention_bias = reader.flag("attention_bias", default=False)
    return {**_decoder(reader), "has_bias": has_bias, "has_qkv_bias": has_attention_bias}


def _mistral(reader: _ConfigReader) -> _Fields:
    return {**_decoder(reader), "sliding_window": reader.optional("sliding_window", 0)}


def _mixtral(reader: _ConfigReader) -> _Fields:
    moe = MoeSpec(
        num_experts=reader.integer("num_local_experts"),
        top_k=reader.integer("num_experts_per_tok"),
        expert_intermediate=reader.integer("intermediate_size"),
    )
    return {**_mistral(reader), "moe": moe}


def _qwen(reader: _ConfigReader) -> _Fields:
    fields = _decoder(reader)
    # The first Qwen counts gate and up projection together.
    return {
        **fields,
        "intermediate": fields["intermediate"] // 2,
        "head_dim": reader.optional("kv_channels", fields["head_dim"]),
        "has_qkv_bias": True,
    }


def _qwen2(reader: _ConfigReader) -> _Fields:
    fields = _decoder(reader)
    # Qwen2 has it whatever the key says.
    reader.get("attention_bias")
    return {**fields, "has_qkv_bias": True, **_qwen_window(reader, fields["num_layers"])}


def _qwen_window(reader: _ConfigReader, num_layers: int) -> _Fields:
    """Return what layers see through a window, and which see all tokens.

    Source: transformers, Qwen2Config: `layer_types`, or a window from layer `max_window_layers` on.
    """
    if not reader.flag("use_sliding_window", default=False):
        return {}
    window = reader.optional("sliding_window", _QWEN_WINDOW)
    if types := reader.texts("layer_types"):
        if "sliding_attention" not in types:
            return {}
        period = _layer_period(reader, num_layers)
        return {"sliding_window": window, "full_attention_period": period}
    first = reader.optional("max_window_layers", _QWEN_WINDOW_LAYERS)
    if first >= num_layers:
        return {}
    if first > 0:
        reader.refuse("max_window_layers", f"a window from layer {first} on cannot be simulated")
    return {"sliding_window": window}


def _qwen2_moe(reader: _ConfigReader) -> _Fields:
    shared_width = reader.integer("shared_expert_intermediate_size")
    expert_width = reader.integer("moe_intermediate_size")
    if shared_width % expert_width:
        reader.refuse(
            "shared_expert_intermediate_size", "must be a multiple of moe_intermediate_size"
        )
    moe = _qwen_experts(reader, num_shared_experts=shared_width // expert_width)
    return {**_qwen2(reader), "moe": moe}


def _qwen3(reader: _ConfigReader) -> _Fields:
    has_bias = reader.flag("attention_bias", default=False)
    reader.require("use_qk_norm", default=True, allowed=True)
    return {**_qwen2(reader), "has_qkv_bias": has_bias, "has_qk_norm": True}


def _qwen3_moe(reader: _ConfigReader) -> _Fields:
    return {**_qwen3(reader), "moe": _qwen_experts(reader, num_shared_experts=0)}


def _qwen_experts(reader: _ConfigReader, num_shared_experts: int) -> MoeSpec:
    reader.require("decoder_sparse_step", default=1, allowed=1)
    return MoeSpec(
        num_experts=reader.integer("num_experts", "num_local_experts"),
        top_k=reader.integer("num_experts_per_tok"),
        expert_intermediate=reader.integer("moe_intermediate_size"),
        num_shared_experts=num_shared_experts,
        num_dense_layers=reader.dense_prefix("mlp_only_layers"),
    )


def _internlm(reader: _ConfigReader) -> _Fields:
    return {**_decoder(reader), "has_qkv_bias": reader.flag("bias", default=False)}


def _gemma(reader: _ConfigReader) -> _Fields:
    return {
        **_decoder(reader),
        "activation": reader.activation("hidden_activation", "hidden_act", default="gelu"),
        "has_tied_embedding": reader.flag("tie_word_embeddings", default=True),
    }


def _layer_period(reader: _ConfigReader, num_layers: int) -> int:
    """Return how often a layer sees all tokens, from the list of layer types; 0 for never."""
    types = reader.texts("layer_types")
    full = [place for place, name in enumerate(types) if name == "full_attention"]
    if not full:
        return 0
    period = full[0] + 1
    if len(types) != num_layers or full != list(range(period - 1, num_layers, period)):
        reader.refuse("layer_types", "full attention must be in every n-th layer")
    return period


def _gpt_oss(reader: _ConfigReader) -> _Fields:
    fields = _decoder(reader)
    moe = MoeSpec(
        num_experts=reader.integer("num_local_experts"),
        top_k=reader.integer("num_experts_per_tok", "experts_per_token"),
        expert_intermediate=fields["intermediate"],
    )
    reader.require("experts_per_token", default=moe.top_k, allowed=moe.top_k)
    return {
        **fields,
        "has_bias": True,
        "has_qkv_bias": reader.flag("attention_bias", default=True),
        "sliding_window": reader.optional("sliding_window", 0),
        "full_attention_period": _layer_period(reader, fields["num_layers"]),
        "moe": moe,
    }


def _deepseek(reader: _ConfigReader) -> _Fields:
    reader.require("moe_layer_freq", default=1, allowed=1)
    moe = MoeSpec(
        num_experts=reader.integer("n_routed_experts"),
        top_k=reader.integer("num_experts_per_tok"),
        expert_intermediate=reader.integer("moe_intermediate_size"),
        num_shared_experts=reader.optional("n_shared_experts", 0),
        num_dense_layers=reader.optional("first_k_dense_replace", 0),
    )
    mla = MlaSpec(
        q_lora_rank=reader.optional("q_lora_rank", 0),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
    )
    return {**_decoder(reader), "head_dim": mla.v_head_dim, "moe": moe, "mla": mla}


def _classic(reader: _ConfigReader) -> _Fields:
    """Read what GPT-NeoX and Phi share: biases, layer norm, no gate, parallel residual."""
    reader.require("attention_bias", default=True, allowed=True)
    return {
        **_decoder(reader),
        "activation": reader.activation("hidden_act", default="gelu"),
        "is_gated": False,
        "norm": "layer_norm",
        "has_bias": True,
        "has_parallel_residual": reader.flag("use_parallel_residual", default=True),
    }


def _phi(reader: _ConfigReader) -> _Fields:
    reader.require("qk_layernorm", default=False, allowed=False)
    return _classic(reader)


def _gpt2(reader: _ConfigReader) -> _Fields:
    hidden, num_heads = reader.integer("n_embd"), reader.integer("n_head")
    if hidden % num_heads:
        reader.refuse("n_embd", f"{hidden} is no multiple of the {num_heads} heads")
    return {
        "num_layers": reader.integer("n_layer"),
        "hidden": hidden,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden // num_heads,
        "intermediate": reader.optional("n_inner", 4 * hidden),
        "vocab": reader.integer("vocab_size"),
        "max_position": reader.integer("n_positions", "n_ctx"),
        "activation": reader.activation("activation_function", default="gelu"),
        "is_gated": False,
        "norm": "layer_norm",
        "position": "learned",
        "has_tied_embedding": reader.flag("tie_word_embeddings", default=True),
        "has_bias": True,
    }


_READERS: Mapping[str, Callable[[_ConfigReader], _Fields]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "gpt_neox": _classic,
    "gpt_oss": _gpt_oss,
    "internlm": _internlm,
    "internlm2": _internlm,
    "kimi_k2": _deepseek,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi": _phi,
    "qwen": _qwen,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
