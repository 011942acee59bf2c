"""Replicas that encode the images of prompts apart from those that read them.

A replica encodes the images of one prompt after those of another, which take as long together as
one after the other. Their embeddings leave over its port while it encodes the next ones, and the
prompt is sent to where it is computed when they are there. Later turns of a conversation have
images that encoders still know. Source: SGLang, docs/advanced_features/epd_disaggregation.md
and srt/disaggregation/encode_server.py; vLLM, docs/features/disagg_encoder.md.
"""

from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.topology import Link
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.image import encode_images, find_encoder
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import ImageSpec
from foretoken.domain.units import NS_PER_S, NS_PER_US
from foretoken.simulator.serving.record import EncoderRecord

# Embeddings are in 16 bits.
_EMBEDDING_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSetup:
    """Replicas that encode: how long the images of a prompt take one, and its port."""

    name: str
    num_replicas: int
    port_ns: int
    latency_ns: int
    sent_bytes: int
    encode_ns: int = 0


class Encoders:
    """Replicas that take prompts in the order in which they come, each the first that is free."""

    def __init__(self, setup: EncoderSetup) -> None:
        self._setup = setup
        self._free_ns = [0] * setup.num_replicas
        self._port_free_ns = [0] * setup.num_replicas
        self._num_prompts = 0

    def take(self, now_ns: int) -> int:
        """Take the images of a prompt; return when its embeddings are where it is computed."""
        place = min(range(len(self._free_ns)), key=self._free_ns.__getitem__)
        encoded_ns = max(now_ns, self._free_ns[place]) + self._setup.encode_ns
        sent_ns = max(encoded_ns, self._port_free_ns[place]) + self._setup.port_ns
        self._free_ns[place], self._port_free_ns[place] = encoded_ns, sent_ns
        self._num_prompts += 1
        return sent_ns + self._setup.latency_ns

    def record(self) -> EncoderRecord:
        """Return what they did so far, what has been taken included."""
        setup, count = self._setup, self._num_prompts
        return EncoderRecord(
            name=setup.name,
            num_replicas=setup.num_replicas,
            num_prompts=count,
            busy_ns=count * setup.encode_ns,
            port_busy_ns=count * setup.port_ns,
            sent_bytes=count * setup.sent_bytes,
        )


def set_up_encoders(scenario: ServingScenario, num_replicas: int, link: Link) -> EncoderSetup:
    """Return the replicas of a pool; `scenario` is that of one, whose embeddings leave over a link.

    How long they encode is not known yet.

    Raises:
        InvalidRequestError: the workload has no images, or the model cannot read them.

    """
    if scenario.workload.images is None:
        raise InvalidRequestError.of_field(
            "cluster.pools", f"{scenario.name} has nothing to encode: set workload.images"
        )
    sent_bytes = embedding_bytes(scenario.model, scenario.workload.images)
    return EncoderSetup(
        name=scenario.name,
        num_replicas=num_replicas,
        port_ns=round(sent_bytes / link.bandwidth_bytes_per_s * NS_PER_S),
        latency_ns=round(link.latency_us * NS_PER_US),
        sent_bytes=sent_bytes,
    )


def embedding_bytes(model: ModelArchitecture, images: ImageSpec) -> int:
    """Return the bytes of the embeddings of one prompt, those of inner layers included."""
    encoder = find_encoder(model)
    num_vectors = encode_images(model, images).num_tokens
    num_vectors *= encoder["num_projectors"] if encoder else 1
    return num_vectors * model.hidden * _EMBEDDING_BYTES
