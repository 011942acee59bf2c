"""`foretoken profile plan` and `devices`: what would be timed, and on what."""

import typer

from foretoken.app.cli.option_group import with_option_groups
from foretoken.app.cli.profile_options import AskedProfile, WrittenRequest, build_request
from foretoken.app.cli.profile_text import outline_table
from foretoken.app.cli.state import note, open_composition, state_of
from foretoken.domain.hardware.device import find_device


@with_option_groups
def plan(context: typer.Context, answers: AskedProfile, written: WrittenRequest = None) -> None:
    """Show what a profile would time: calls by operator, what is known, how long it takes.

    The device need not be here: `foretoken profile plan --device h200_sxm --model llama-3.1-8b`
    """
    state = state_of(context)
    with open_composition(state) as services:
        request = build_request(answers, written)
        outline = services.profiler.outline_profile(request)
        state.print_object(outline, lambda: outline_table(outline))


def devices(context: typer.Context) -> None:
    """List the devices present where the profiler runs."""
    state = state_of(context)
    with open_composition(state) as services:
        found = services.profiler.list_local_devices()
        rows = [(name, find_device(name).description) for name in found]
        state.print_rows("Devices present", ("device", "description"), rows)
        if len(found) == 1:
            note("GPUs are found through torch: is a CUDA build of it installed, and a driver?")
