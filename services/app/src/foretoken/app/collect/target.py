"""Which server to ask, and how it wants to be asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.domain.errors import InvalidRequestError

APIS: Mapping[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """What a kind of server takes beyond OpenAI's own fields.

    `takes_token_ids`: a prompt may be a list of token ids. `options` are sent as they are;
    `min_tokens` is set to the length of the answer where `has_min_tokens`. `stream_options` ask for
    counts of tokens.
    """

    takes_token_ids: bool = False
    has_min_tokens: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    stream_options: Mapping[str, Any] = field(default_factory=lambda: {"include_usage": True})


_COUNTED = {"include_usage": True, "continuous_usage_stats": True}

# Source: vLLM's, SGLang's and TensorRT-LLM's OpenAI-compatible protocols, and OpenAI's API
# reference, which knows none of these options and refuses them.
DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(
        takes_token_ids=True,
        has_min_tokens=True,
        options={"ignore_eos": True, "temperature": 0.0},
        stream_options=_COUNTED,
    ),
    "sglang": Dialect(
        takes_token_ids=True,
        has_min_tokens=True,
        options={"ignore_eos": True, "temperature": 0.0},
    ),
    "trtllm": Dialect(
        takes_token_ids=True,
        has_min_tokens=True,
        options={"ignore_eos": True, "temperature": 0.0},
        stream_options=_COUNTED,
    ),
    "openai": Dialect(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server and how to ask it.

    `url` is its address, with or without `/v1`. A request is given up after `timeout_s`.
    `certificates` is a file of certificate authorities to trust (empty: the usual ones). `body`
    adds to every request.
    """

    url: str
    model: str
    api: str = "completions"
    server: str = "vllm"
    api_key: str = ""
    timeout_s: float = 600.0
    verifies_tls: bool = True
    certificates: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no server could be asked with."""
        checks = {
            "--url": (
                self.url.startswith(("http://", "https://")),
                f"must begin with http:// or https://, found {self.url!r}",
            ),
            "--api": (self.api in APIS, f"must be one of {', '.join(APIS)}"),
            "--server": (self.server in DIALECTS, f"must be one of {', '.join(DIALECTS)}"),
            "--timeout": (self.timeout_s > 0, "must be positive"),
        }
        InvalidRequestError.check("", checks)

    @property
    def root(self) -> str:
        """The address without `/v1` and without a slash at its end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def path(self) -> str:
        """The path that requests go to."""
        return APIS[self.api]

    @property
    def dialect(self) -> Dialect:
        """How the server wants to be asked."""
        return DIALECTS[self.server]

    @property
    def sends_token_ids(self) -> bool:
        """Whether prompts are token ids rather than words; a chat is always words."""
        return self.api == "completions" and self.dialect.takes_token_ids

    def build_body(self, prompt: Sequence[int] | str, num_decode_tokens: int) -> dict[str, Any]:
        """Return the body of a request for an answer of so many tokens."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": num_decode_tokens,
            "stream": True,
            "stream_options": dict(self.dialect.stream_options),
            **self.dialect.options,
        }
        if self.dialect.has_min_tokens:
            body["min_tokens"] = num_decode_tokens
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return {**body, **self.body}
