"""What a source file imports."""

import ast
import sys
from pathlib import Path


def third_party_packages(path: Path) -> set[str]:
    """Return the top-level packages a file imports anywhere, but for ours and Python's own."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"foretoken"}
