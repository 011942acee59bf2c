"""What requests arrive: when, how long their prompts are, how many tokens they ask for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foretoken.domain import schema
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.requests.option import describe, option
from foretoken.domain.units import MAX_COUNT


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSpec:
    """A distribution of token counts; `kind` is one of these.

    `fixed`: always `mean`. `uniform`: `minimum` to `maximum`. `lognormal`: of that `mean` and
    standard deviation `spread` x `mean`. `zipf`: `minimum` to `maximum`, the k-th with weight
    1 / k^`spread`. `empirical`: drawn from `values`. Where `maximum` is above 0 it caps any.
    """

    kind: str = "fixed"
    mean: int = 0
    minimum: int = 1
    maximum: int = 0
    spread: float = 0.0
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse negative lengths."""
        violations = [
            FieldViolation(name, "must not be negative")
            for name in ("mean", "minimum", "maximum", "spread")
            if not getattr(self, name) >= 0
        ]
        if any(value < 1 for value in self.values):
            violations.append(FieldViolation("values", "must all be at least 1"))
        if violations:
            raise InvalidRequestError(f"length: {violations[0].field} is negative", violations)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSpec:
    """Conversations: a request's prompt begins with the turns before it.

    A session has `turns` requests; the next turn arrives `think_s` (mean, exponential) after the
    answer before it is complete. Every prompt of the workload begins with the same
    `shared_prefix_tokens`, of `num_shared_prefixes` different ones, taken evenly.
    """

    turns: LengthSpec = field(default_factory=lambda: LengthSpec(mean=1))
    think_s: float = 0.0
    shared_prefix_tokens: int = 0
    num_shared_prefixes: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be waited for or shared."""
        checks = {
            "think_s": (self.think_s >= 0, "must not be negative"),
            "shared_prefix_tokens": (
                0 <= self.shared_prefix_tokens <= MAX_COUNT,
                f"must be 0 to {MAX_COUNT:,}",
            ),
            "num_shared_prefixes": (self.num_shared_prefixes >= 1, "must be at least 1"),
        }
        InvalidRequestError.check("sessions", checks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpec:
    """Images of every prompt: so many, each of `height` x `width` pixels.

    With more than one of `num_frames` each is a video of so many.

    Their tokens are part of the prompt's, at its beginning, after what all prompts share. The
    model's encoder says how many they are.
    """

    num_images: int = 1
    height: int = 1024
    width: int = 1024
    num_frames: int = 1

    def __post_init__(self) -> None:
        """Refuse images of nothing."""
        fields = ("num_images", "height", "width", "num_frames")
        checks = {name: (getattr(self, name) >= 1, "must be at least 1") for name in fields}
        InvalidRequestError.check("images", checks)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundSpec:
    """Recordings of every prompt: so many, each of `seconds`.

    Their tokens are part of the prompt's, as those of images are.
    """

    num_clips: int = 1
    seconds: float = 30.0

    def __post_init__(self) -> None:
        """Refuse recordings of nothing."""
        checks = {
            "num_clips": (self.num_clips >= 1, "must be at least 1"),
            "seconds": (self.seconds > 0, "must be positive"),
        }
        InvalidRequestError.check("sound", checks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of a resolved workload; times in s from the start.

    `block_hashes` name the content of its prompt, block by block of the workload's
    `hash_block_tokens`: equal prefixes of hashes are equal prompts. Requests of one `session` (0:
    none) are its turns in order: a later one arrives `think_s` after the answer before it is
    complete, or at `arrival_s` if that is later. `after` has the places, from 0 on, of earlier
    requests of the workload, of any session, that must be complete as well: branches of an agent
    that run side by side, and what joins them. `think_s` then counts from the last answer.
    `slo_class` names a class of the scenario.
    """

    arrival_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    block_hashes: tuple[int, ...] = ()
    session: int = 0
    think_s: float = 0.0
    slo_class: str = ""
    after: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """Arrivals and lengths, or a trace.

    `arrival` names a plug-in of `simulator/workload/arrivals` (`poisson`, `gamma`, `markov`,
    `constant`, `closed_loop`, `trace`); `arrival_options` are its own knobs. A `trace` brings its
    own lengths; `trace_format` names a plug-in of `simulator/workload/traces` (empty: recognised by
    its content); `trace_requests` holds them inline once loaded, so that a scenario is complete
    wherever it runs. Of a trace only arrivals from `window_start_s` to `window_end_s` (0: the end)
    count, from the window's start on; then `time_scale` stretches their times, and at most
    `max_num_requests` (0: all) are taken. `rate_rps` applies to synthetic arrivals. Prompts and
    answers are cut so that their sum is at most `max_tokens_per_request` (0: no limit).
    """

    arrival: str = option("poisson", "poisson gamma markov constant closed_loop trace")
    arrival_options: Mapping[str, str] = field(default_factory=dict)
    rate_rps: float = option(1.0, "requests/s on average")
    num_requests: int = option(100, "requests that arrive")
    prefill: LengthSpec = field(
        default_factory=lambda: LengthSpec(mean=512),
        metadata=describe("prompt tokens", example={"kind": "fixed", "mean": 512}),
    )
    decode: LengthSpec = field(
        default_factory=lambda: LengthSpec(mean=128),
        metadata=describe(
            "answer tokens", example={"kind": "uniform", "minimum": 64, "maximum": 256}
        ),
    )
    trace_path: str = ""
    trace_requests: tuple[Request, ...] = field(default=(), metadata=schema.BY_COLUMNS)
    time_scale: float = 1.0
    max_tokens_per_request: int = option(0, "0: no limit")
    trace_format: str = ""
    hash_block_tokens: int = 0
    window_start_s: float = 0.0
    window_end_s: float = 0.0
    max_num_requests: int = 0
    sessions: SessionSpec | None = None
    images: ImageSpec | None = None
    sound: SoundSpec | None = None

    @property
    def is_text(self) -> bool:
        """Whether prompts have nothing to encode."""
        return self.images is None and self.sound is None

    def without_media(self) -> "WorkloadSpec":
        """Return the workload with nothing to encode, as many tokens as it may be."""
        return replace(self, images=None, sound=None)

    @property
    def num_prompt_tokens_min(self) -> int:
        """Tokens that the prompt of a first request has at least, as far as is known."""
        if self.trace_requests:
            return min(request.num_prefill_tokens for request in self.trace_requests)
        shared = self.sessions.shared_prefix_tokens if self.sessions else 0
        lengths = self.prefill
        if lengths.kind == "fixed":
            return shared + lengths.mean
        return shared + (min(lengths.values, default=1) if lengths.values else lengths.minimum)

    def __post_init__(self) -> None:
        """Refuse rates and counts that mean nothing."""
        checks: dict[str, tuple[bool, str]] = {
            "rate_rps": (self.rate_rps > 0, "must be positive"),
            "num_requests": (
                1 <= self.num_requests <= MAX_COUNT,
                f"must be from 1 to {MAX_COUNT:,}",
            ),
            "time_scale": (self.time_scale > 0, "must be positive"),
            "max_tokens_per_request": (
                self.max_tokens_per_request >= 0,
                "must not be negative; 0 is no limit",
            ),
            "hash_block_tokens": (self.hash_block_tokens >= 0, "must not be negative"),
            "window_start_s": (self.window_start_s >= 0, "must not be negative"),
            "window_end_s": (
                self.window_end_s == 0 or self.window_end_s > self.window_start_s,
                "must be after window_start_s; 0 is the end of the trace",
            ),
            "max_num_requests": (self.max_num_requests >= 0, "must not be negative; 0 is all"),
        }
        InvalidRequestError.check("workload", checks)
