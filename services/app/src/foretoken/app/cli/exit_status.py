"""The status that a command leaves with where its answer is that nothing does what was asked."""

import typer

NO_ANSWER = 3
# What `--help` says of all commands.
STATUS_HELP = (
    "Exit status: 0 the answer is there; 1 an error, with its reason; 2 wrong usage; 3 a valid"
    " question whose answer is that nothing does it: what was asked does not fit, or no candidate"
    " meets the targets. The answer is printed all the same."
)


def leave_unless(has_answer: bool) -> None:
    """Leave with status 3, once everything is printed and written, where nothing does it."""
    if not has_answer:
        raise typer.Exit(code=NO_ANSWER)
