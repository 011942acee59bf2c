"""What an encoder makes of recordings: frames, and tokens among those of the prompt."""

from math import ceil

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.image import EncodedImages
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.requests.workload import SoundSpec

# Frames of a second that a conformer is left with, each a token, and the most of a recording.
# Source: `audio_ms_per_token` and `audio_seq_length` of Gemma 4's processor in transformers 5.
_CONFORMER_FRAMES_PER_S, _MAX_CONFORMER_FRAMES = 25, 750


def encode_sound(model: ModelArchitecture, sound: SoundSpec, first_token: int = 0) -> EncodedImages:
    """Return what a model's encoder makes of recordings.

    A conformer takes the seconds that there are, up to its limit. Whisper's encoder computes whole
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


def _of_conformer(_: LayerPart, seconds: float) -> tuple[int, int, int]:
    frames = min(ceil(seconds * _CONFORMER_FRAMES_PER_S), _MAX_CONFORMER_FRAMES)
    return 1, frames, frames


def _of_whisper(part: LayerPart, seconds: float) -> tuple[int, int, int]:
    window, merged, rate = (
        part[name] for name in ("num_positions", "merged_frames", "frames_per_s")
    )
    if part["has_whole_windows"]:
        return ceil(seconds * rate / window), window, window // merged
    frames = min(seconds * rate, window)
    return 1, window, max(int(frames / merged), 1)


_MAKES = {"audio_encoder": _of_conformer, "speech_encoder": _of_whisper}
