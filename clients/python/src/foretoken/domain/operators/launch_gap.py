"""Host time of running kernels one after the other; the row's variant says how (`part=...`).

`launch_eager` are calls of one tiny operator, `operators_eager` and `operators_training` those that
a small model consists of, called without the model; `model_eager` and `model_training` the model
itself: its modules, the dispatch of its operators, autograd. On a GPU it is the time until all is
queued, on a CPU, which queues nothing, until all is done, on tensors of a few elements. `replay` is
the time of a CUDA graph of tiny kernels on the device, `launch_graph` the host's part of it.
"""

from foretoken.domain.operators.spec.operator import Dim, OperatorSpec

# What a launch hands over at the least: a function's address.
_LAUNCH_BYTES = 8


SPEC = OperatorSpec(
    name="launch_gap",
    summary="launch kernels one after the other, on the host or in a graph",
    group="host",
    dims=(Dim("num_kernels", "kernels launched"),),
    flops=lambda d, _: 0 * d["num_kernels"],
    moved_bytes=lambda d, _: _LAUNCH_BYTES * d["num_kernels"],
    costs={"kernels": lambda d, _: d["num_kernels"]},
    sweep=lambda _: (),
)
