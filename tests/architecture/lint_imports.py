"""Runs import-linter on the whole of `foretoken`: `python tests/architecture/lint_imports.py`."""

from importlinter.cli import lint_imports_command

# Imported, the package knows all its source roots; the linter queries it, and imports nothing
# itself.
import foretoken

if __name__ == "__main__":
    assert foretoken.__spec__ is not None
    lint_imports_command()
