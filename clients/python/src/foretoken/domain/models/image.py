"""What an encoder makes of an image: patches, and tokens among those of the prompt."""

from dataclasses import dataclass, replace
from math import ceil, floor, isqrt, sqrt

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.requests.workload import ImageSpec

# Parts of a model that encode images.
IMAGE_KINDS = ("encoder", "summed_encoder")
# Numbers of a pixel.
_COLORS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedImages:
    """The images of a prompt: each of `num_patches`, which become `tokens_each` tokens.

    Of a video they are its frames, or as many together as a patch reaches over.

    They stand in the prompt from `first_token` on, one after the other. Where pieces of a prompt
    count as alike, their work is spread over `spread_tokens` of it (0: it is where they stand).
    The part of the model of that `kind` encodes them: recordings are images of so many frames.
    """

    num_images: int
    num_patches: int
    tokens_each: int
    first_token: int = 0
    spread_tokens: int = 0
    kind: str = "encoder"

    @property
    def num_tokens(self) -> int:
        """Tokens of all images together."""
        return self.num_images * self.tokens_each


def find_encoder(model: ModelArchitecture) -> LayerPart | None:
    """Return the part of a model that encodes images; None where it reads text alone."""
    return next((part for part in model.extras if part.kind in IMAGE_KINDS), None)


def without_encoder(model: ModelArchitecture) -> ModelArchitecture:
    """Return a model without its encoder, as engines load it that are sent embeddings."""
    others = tuple(part for part in model.extras if part.kind not in IMAGE_KINDS)
    return replace(model, extras=others)


def encode_images(
    model: ModelArchitecture, images: ImageSpec, first_token: int = 0
) -> EncodedImages:
    """Return what a model's encoder makes of images.

    Sides are rounded to whole tokens. An image with more tokens than the encoder gives is made
    smaller, its sides in proportion. Patches of an encoder for videos reach over several frames,
    which attend to no others; others encode every frame as an image. Source: the processors of
    Qwen2-VL, Kimi-VL and Gemma 4, and `get_vision_cu_seqlens` of Qwen3-VL, in transformers 5.

    Raises:
        InvalidRequestError: the model has no encoder, or its patches are not known.

    """
    encoder = find_encoder(model)
    if encoder is not None and encoder.kind == "summed_encoder":
        return _encode_summed(encoder, images, first_token)
    if encoder is None or not encoder["patch_side"]:
        why = "has no encoder" if encoder is None else "does not say how large a patch is"
        raise InvalidRequestError.of_field("workload.images", f"{model.name} {why}")
    merged, longest = encoder["merged_patches"], encoder["max_image_tokens"]
    pixels = encoder["patch_side"] * isqrt(merged)
    rows, columns = (max(round(side / pixels), 1) for side in (images.height, images.width))
    if longest and rows * columns > longest:
        smaller = sqrt(longest / (rows * columns))
        rows, columns = (max(floor(side * smaller), 1) for side in (rows, columns))
    together = max(encoder["patch_features"] // (_COLORS * encoder["patch_side"] ** 2), 1)
    return EncodedImages(
        num_images=images.num_images * ceil(images.num_frames / together),
        num_patches=rows * columns * merged,
        tokens_each=rows * columns,
        first_token=first_token,
    )


def _encode_summed(part: LayerPart, images: ImageSpec, first_token: int) -> EncodedImages:
    """Return images that are all made one size, or cut into patches of a token."""
    side, num_patches = part["patch_side"], 1
    if side:
        num_patches = ceil(images.height / side) * ceil(images.width / side)
    return EncodedImages(
        num_images=images.num_images * ceil(images.num_frames / part["frames"]),
        num_patches=num_patches,
        tokens_each=num_patches * part["num_tokens"],
        first_token=first_token,
        kind=part.kind,
    )
