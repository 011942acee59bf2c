"""One part of what the host does for a serving step; the row's variant says which (`part=...`).

It takes the time of a processor, not of the device: its roofline is a bound that never binds.
The work is a serving engine's own, so it comes from imports alone.
"""

from foretoken.domain.operators.spec.operator import Dim, OperatorSpec

# A token's id, as it goes to the device and back.
_ID_BYTES = 8


SPEC = OperatorSpec(
    name="host_step",
    summary="schedule, prepare, sample or hand back one serving step, on the host",
    group="host",
    dims=(
        Dim("num_seqs", "sequences in the batch"),
        Dim("num_ranks", "tensor-parallel ranks that the host drives"),
    ),
    flops=lambda d, _: 0 * d["num_seqs"],
    moved_bytes=lambda d, _: _ID_BYTES * d["num_seqs"],
    sweep=lambda _: (),
)
