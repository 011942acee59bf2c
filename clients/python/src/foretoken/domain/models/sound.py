"""What an encoder makes of recordings: frames, and tokens among those of the prompt."""

from math import ceil

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.image import EncodedImages
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.requests.workload import SoundSpec

_MS_OF_S = 1000


def encode_sound(model: ModelArchitecture, sound: SoundSpec, first_token: int = 0) -> EncodedImages:
    """Return what a model's encoder makes of recordings.

    A conformer takes the seconds that there are, up to its limit; of each window of frames, the
    last one filled up, queries make tokens, or each frame is one. Whisper's encoder computes whole
    windows, of 30 s where a model has no shorter ones; what fills the last one up becomes tokens as
    well where the model says so.

    Raises:
        InvalidRequestError: the model hears nothing.

    """
    encoder = next((part for part in model.extras if part.kind in _MAKES), None)
    if encoder is None:
        raise InvalidRequestError.of_field("workload.sound", f"{model.name} has no encoder of it")
    windows, frames, tokens = _MAKES[encoder.kind](encoder, sound.seconds)
    return EncodedImages(
        num_images=sound.num_clips * windows,
        num_patches=frames,
        tokens_each=tokens,
        first_token=first_token,
        kind=encoder.kind,
    )


def _of_conformer(part: LayerPart, seconds: float) -> tuple[int, int, int]:
    frames = ceil(seconds * _MS_OF_S / part["frame_ms"])
    frames = min(frames, part["max_frames"] or frames)
    window = part["query_window"]
    return 1, frames, ceil(frames / window) * part["window_queries"] if window else frames


def _of_whisper(part: LayerPart, seconds: float) -> tuple[int, int, int]:
    window, merged, rate = (
        part[name] for name in ("num_positions", "merged_frames", "frames_per_s")
    )
    if part["has_whole_windows"]:
        return ceil(seconds * rate / window), window, window // merged
    frames = min(seconds * rate, window)
    return 1, window, max(int(frames / merged), 1)


_MAKES = {"audio_encoder": _of_conformer, "speech_encoder": _of_whisper}
