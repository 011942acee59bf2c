"""What of a device's memory no tensor can have: driver, CUDA context, communicators.

Whether something fits is judged against what this leaves, for engines and trainers alike. The
memory of a device is what nvidia-smi shows in all.
"""

from collections.abc import Iterable

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.units import GIB, Quantity

_MIB = 2**20
# What the driver keeps of the memory that nvidia-smi shows: 0.46 GiB of an H100's, 0.47 GiB of an
# RTX 4090's, 0.59 GiB of an H200's. Source: torch.cuda.mem_get_info of each, as engines log it.
_DRIVER_BYTES = GIB // 2
# A process's CUDA context with the kernels it has loaded: 300 MB to 500 MB. Source: K. Fujii,
# memory estimator of 4D-parallel training (okoge-kaz.github.io/tools/memory-estimator).
_CONTEXT_BYTES = 500_000_000
# Buffers of an NCCL communicator of two ranks, and what one of more has in addition: 544 and 688
# MiB after its first all-reduce on A100. Source: NVIDIA/nccl, issue 964.
_PAIR_BYTES, _MORE_RANKS_BYTES = 544 * _MIB, 144 * _MIB
# Axes of a training layout whose ranks have a communicator each.
TRAINING_AXES = ("tp", "pp", "dp", "cp", "ep")


def visible_bytes(device: DeviceSpec) -> float:
    """Return the memory of a device that a process sees: all but what its driver keeps."""
    return device.memory_bytes - (_DRIVER_BYTES if device.kind == "gpu" else 0)


def context_bytes(device: DeviceSpec) -> float:
    """Return what a process takes of the visible memory before it has any tensor."""
    return float(_CONTEXT_BYTES if device.kind == "gpu" else 0)


def training_headroom_bytes(
    device: DeviceSpec, trainer: TrainerProfile, degrees: Iterable[Quantity]
) -> Quantity:
    """Return what a trainer's allocator cannot have of a device.

    There is a communicator for each axis of the layout with more than one rank; `degrees` are
    those of `TRAINING_AXES`, numbers or columns of numbers. A trainer may have its own figure.
    """
    if trainer.context_bytes or device.kind != "gpu":
        return float(trainer.context_bytes)
    outside: Quantity = device.memory_bytes - visible_bytes(device) + context_bytes(device)
    for degree in degrees:
        outside = outside + (degree > 1) * _PAIR_BYTES + (degree > 2) * _MORE_RANKS_BYTES  # noqa: PLR2004
    return outside
