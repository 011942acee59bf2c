"""Take typed values from a Hugging Face `config.json`, and refuse what nobody looked at.

A key that no reader took is either one of training, tokens or numerics, which run no operator, or
says nothing because it is off; every other one is an error, so that no model is simulated as
another.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.domain.errors import FieldViolation
from foretoken.domain.models.architecture import MAX_LAYERS

# Far above any count or width of a model, and small enough to be reckoned with.
_MAX_SIZE = 2**31 - 1

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    # Gates like silu's, with limits or scales of their own.
    "swigluoai": "silu",
    "situ": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    # With a product more than the maximum alone.
    "relu": "relu2",
    "relu2": "relu2",
    # As many products an element as the square has.
    "xielu": "relu2",
}
# Keys that run no operator, whatever their value is.
# Source: transformers 5, configuration_utils.py (those that every file may have).
_INERT = frozenset(
    (
        # what the file is of, and how its tensors are kept
        *("architectures", "auto_map", "model_type", "dtype", "torch_dtype", "quantization_config"),
        *(
            "attn_implementation",
            "transformers_version",
            "tokenizer_class",
            "id2label",
            "label2id",
            "problem_type",
        ),
        *("unsloth_fixed", "processor_class", "torchscript", "use_bfloat16", "expert_dtype"),
        # training
        *("initializer_range", "initializer_factor", "init_std", "layer_norm_epsilon", "norm_eps"),
        *(
            "rms_norm_eps",
            "layernorm_epsilon",
            "layer_norm_eps",
            "hc_eps",
            "seq_aux",
            "router_bias",
        ),
        *("pretraining_tp", "ep_size", "finetuning_task", "gradient_checkpointing", "use_cache"),
        *("rescale_prenorm_residual", "scale_attn_weights", "summary_type", "summary_use_proj"),
        *(
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "n_ctx",
            "seq_length",
        ),
        *("router_jitter_noise", "output_router_logits", "num_reward_heads", "ignore_index"),
        # generation
        *("top_k", "top_p", "temperature", "typical_p", "do_sample", "num_beams", "max_length"),
        *("min_length", "length_penalty", "repetition_penalty", "diversity_penalty", "prefix"),
        *("num_beam_groups", "num_return_sequences", "no_repeat_ngram_size", "bad_words_ids"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "early_stopping"),
        *("remove_invalid_values", "return_dict", "return_dict_in_generate", "suppress_tokens"),
        *("begin_suppress_tokens", "task_specific_params", "num_logits_to_keep", "pruned_heads"),
        *("output_attentions", "output_hidden_states", "output_scores", "chunk_size_feed_forward"),
        # how positions turn, not how many features do
        *("rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "rope_type"),
        *("rotary_emb_base", "swa_rope_theta", "compress_rope_theta", "use_mrope", "rope_mode"),
        *("indexer_rope_interleave", "rotary_pct", "partial_rotary_factor", "rotary_dim"),
        *(
            "use_dynamic_ntk",
            "use_logn_attn",
            "attn_temperature_tuning",
            "attn_scale",
            "floor_scale",
            "original_max_position_embeddings",
        ),
        # factors, limits and number formats of what runs anyway
        *("norm_topk_prob", "routed_scaling_factor", "scoring_func", "topk_method", "n_group"),
        *("topk_group", "use_grouped_topk", "num_expert_group", "moe_renormalize"),
        *("moe_router_activation_func", "moe_router_dtype", "moe_router_scaling_factor"),
        *("swiglu_limit", "swiglu_alpha", "swiglu_limits", "swiglu_limits_shared"),
        *("activation_situ_beta", "activation_situ_linear_beta", "attention_value_scale"),
        *("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"),
        *("residual_in_fp32", "mamba_ssm_dtype", "time_step_floor", "time_step_max"),
        *(
            "time_step_min",
            "time_step_limit",
            "time_step_rank",
            "use_mamba_kernels",
            "use_routing_bias",
        ),
        *(
            "use_moe_router_bias",
            "use_gemma_norm",
            "moe_shared_expert_overlap",
            "hc_sinkhorn_iters",
        ),
        *(
            "no_bias",
            "initial_context_length",
            "fp16",
            "bf16",
            "fp32",
            "use_flash_attn",
            "use_cache_kernel",
            "use_cache_quantization",
        ),
        *(
            "onnx_safe",
            "softmax_in_fp32",
            "reorder_and_upcast_attn",
            "scale_attn_by_inverse_layer_idx",
        ),
        *("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"),
        *("attention_multiplier", "norm_epsilon", "moe_norm_min", "input_jitter_noise"),
        *("cache_implementation", "rope_local_base_freq", "scale_attention_softmax_in_fp32"),
        *("embd_pdrop", "resid_pdrop", "attn_pdrop", "classifier_dropout", "hidden_dropout"),
        # images and sound in addition to their encoders
        *(
            "image_placeholder",
            "video_placeholder",
            "use_unified_vision_chunk",
            "image_grid_pinpoints",
        ),
        *("image_seq_length", "process_image_mode", "vision_feature_layer", "language_model_only"),
        *(
            "vision_feature_select_strategy",
            "use_bidirectional_attention",
            "vision_soft_tokens_per_image",
        ),
        *("img_token_compression_config", "multimodal_projector_bias", "projector_hidden_act"),
        *("projector_hidden_size", "output_gate_type"),
    )
)
_INERT_NAMES = re.compile(r"_|.*(_token_(id|ids|index)|dropout|_loss_coef|_loss_alpha)$")
_NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})


def is_inert_key(key: str) -> bool:
    """Return whether a key runs no operator, whatever its value is."""
    return key in _INERT or _INERT_NAMES.match(key) is not None


class ConfigReader:
    """Take typed values from a config and note what is wrong with it.

    `path` is where it stands in its file, `text_config.` for one.
    """

    def __init__(self, config: Mapping[str, Any], path: str = "") -> None:
        """Begin with nothing read."""
        self._config, self._path = config, path
        self._read: set[str] = set()
        self._sections: list[ConfigReader] = []
        self._own: list[FieldViolation] = []
        self._renamed: dict[str, str] = {}

    @property
    def violations(self) -> list[FieldViolation]:
        """What is wrong, in sections too."""
        return self._own + [found for section in self._sections for found in section.violations]

    @property
    def keys(self) -> Sequence[str]:
        """The keys there are."""
        return tuple(map(str, self._config))

    def section(self, key: str) -> "ConfigReader":
        """Return the reader of a nested object; of an empty one where there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(key, f"expected an object, found {value!r:.80}")
        content = value if isinstance(value, Mapping) else {}
        self._sections.append(ConfigReader(content, f"{self._path}{key}."))
        return self._sections[-1]

    def part(self, key: str) -> "ConfigReader":
        """Return the reader of a nested object of which further keys change no operators."""
        inner = self.section(key)
        inner.ignore(*inner.keys)
        return inner

    def assume(self, defaults: Mapping[str, Any]) -> None:
        """Take these values for keys that are missing, as the model's configuration class does."""
        self._config = {**defaults, **self._config}

    def rename(self, names: Mapping[str, str]) -> None:
        """Read keys by the names that most families have for them: `names` has these by own ones.

        What is wrong with one is said of the key that the file has, or should have.
        """
        found = {own: usual for own, usual in names.items() if own in self._config}
        missing = {usual: own for own, usual in names.items() if usual not in self._config}
        self._renamed |= {**missing, **{usual: own for own, usual in found.items()}}
        self._config = {found.get(key, key): value for key, value in self._config.items()}

    def has(self, key: str) -> bool:
        """Return whether a key says something."""
        return self._config.get(key) not in _NOTHING

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
        most = MAX_LAYERS if key.endswith("_layers") else _MAX_SIZE
        if abs(value) > most:
            self.refuse(key, f"is more than {most:,}")
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

    def alike(self, key: str, default: int) -> int:
        """Return an integer that a file may say for every layer, all alike."""
        value = self.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            self._config = {**self._config, key: value[0]}
        return self.optional(key, default)

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

    def numbers(self, key: str, length: int) -> list[int] | None:
        """Return a number for each of `length` layers, further ones left out; None without any."""
        value = self.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) < length
            or not all(isinstance(item, int) and abs(item) <= _MAX_SIZE for item in value)
        ):
            self.refuse(key, f"expected an integer for each of the {length} layers")
            return None
        return value[:length]

    def names(self, key: str, length: int, known: Sequence[str]) -> list[str] | None:
        """Return a name of `known` for each of `length` layers; None without any."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length or not set(value) <= set(known):
            self.refuse(key, f"expected one of {', '.join(known)} for each of {length} layers")
            return None
        return value[:length]

    def refuse_unread(self, model_type: str) -> None:
        """Refuse what nobody looked at and may change the operators, in sections too."""
        for section in self._sections:
            section.refuse_unread(model_type)
        for key, value in self._config.items():
            if key not in self._read and not self._is_inert(key, value):
                reason = (
                    f"{value!r:.80} may change the operators: a {model_type} model has no such key"
                )
                self.refuse(key, reason)

    def _is_inert(self, key: str, value: object) -> bool:
        """Whether a key leaves the operators as they are without it."""
        if is_inert_key(key) or value in _NOTHING:
            return True
        if key == "layer_types" and isinstance(value, list):
            return set(value) <= {"full_attention"}
        is_window = key in ("sliding_window", "max_window_layers")
        return is_window and self._config.get("use_sliding_window") is False

    def ignore(self, *keys: str) -> None:
        """Count keys as looked at that say again what others say."""
        self._read.update(keys)

    def refuse(self, key: str, description: str) -> None:
        """Note what is wrong with a key."""
        key = self._renamed.get(key, key)
        self._own.append(FieldViolation(f"{self._path}{key}", description))
