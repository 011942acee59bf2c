"""What the images of a prompt add to the prefill that computes their tokens.

An engine encodes an image in the step that first computes tokens of it, on the ranks of the first
layers, before those run. The images of a prompt are alike and take equal parts of the time of all;
a prefill pays for the part of their tokens that it computes, so that chunks and what a prefix cache
holds pay their share. Source: vLLM 0.20, v1/core/sched/scheduler.py `_try_schedule_encoder_inputs`
and v1/worker/gpu_model_runner.py `_execute_mm_encoder`.
"""

from collections.abc import Callable, Sequence

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode, RankContext
from foretoken.domain.lowering.image_encoder import lower_encoder
from foretoken.domain.measurements.estimate import LatencyColumns
from foretoken.domain.models.image import EncodedImages
from foretoken.simulator.cost.answer import channels_of, num_channels
from foretoken.simulator.cost.family import Axes
from foretoken.simulator.cost.launching import count_launches
from foretoken.simulator.cost.surface import SurfaceSpec
from foretoken.simulator.grid import Floats


def encoder_nodes(spec: SurfaceSpec, rank: RankContext) -> list[OperatorNode]:
    """Return what a rank of the first stage computes for the images of one prompt."""
    return [] if spec.images is None else lower_encoder(rank, spec.images, spec.options.dtype)


def add_image_ends(images: EncodedImages, axes: Axes) -> Axes:
    """Return the axes with the tokens at which the images begin and end, as far as they reach."""
    ends = np.array([images.first_token, images.num_tokens, images.first_token + images.num_tokens])
    return tuple(np.union1d(axis, ends[(ends >= axis[0]) & (ends <= axis[-1])]) for axis in axes)


def image_share(images: EncodedImages, axes: Axes) -> Floats:
    """Return which part of a prompt's image tokens each prefill computes, [grid point].

    `axes` are new tokens and the context before them.
    """
    new, context = (column.ravel() for column in np.meshgrid(*axes, indexing="ij"))
    if images.spread_tokens:
        return np.asarray(new / images.spread_tokens, dtype=np.float64)
    last = images.first_token + images.num_tokens
    begin = np.clip(context, images.first_token, last)
    end = np.clip(context + new, images.first_token, last)
    share: Floats = (end - begin) / images.num_tokens
    return share


def encoding_channels(
    nodes: Sequence[OperatorNode],
    groups: Sequence[str],
    answer_of: Callable[[OperatorNode], LatencyColumns],
    launch_us: float,
) -> Floats:
    """Return the channels of encoding the images of one prompt, [channel, 1].

    An encoder runs outside of CUDA graphs: it takes no less than the launches of its kernels.
    """
    total = np.zeros((num_channels(len(groups)), 1))
    for node in nodes:
        answer = answer_of(node)
        total += node.repeat * channels_of(answer, groups.index(node.group), len(groups))
    computed_us = float(total[: len(groups)].sum())
    launches_us = launch_us * count_launches(nodes)
    return total * max(1.0, launches_us / computed_us) if computed_us else total
