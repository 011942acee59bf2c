"""Import every command, as running each does."""

# A program's text, for what is imported is asked of a process of its own.
IMPORT_COMMANDS = """
import sys
from foretoken.app.cli.command_table import RootGroup
from foretoken.app.cli.command_table import LazyGroup

def import_commands(group):
    for entry in group.listed:
        command = entry.load()
        if isinstance(command, LazyGroup):
            import_commands(command)

import_commands(RootGroup)
assert "foretoken.app.cli.search_training" in sys.modules
"""
