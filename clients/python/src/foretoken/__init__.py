"""What an LLM deployment will cost in time, memory and money, before anyone rents the GPUs.

```python
import foretoken

with foretoken.open() as ft:
    scenario = foretoken.ServingScenario(model="llama-3.1-8b", device="h100_sxm")
    report = ft.simulate_serving(scenario)
    print(report)
    report.save("page.html")
```

`__init__.pyi` says where each public name is; its module is imported when the name is first used,
so that `import foretoken` costs next to nothing, and a client need not have what services need.
"""

import os
import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A checkout has the parts of the package in several source roots, a wheel has them in one folder.
# What `pkgutil.extend_path` does, without the 20 ms that loading it takes, or pathlib.
_parts = (os.path.join(root, __name__) for root in sys.path)  # noqa: PTH118 - as said
__path__.extend(part for part in _parts if part not in __path__ and os.path.isdir(part))  # noqa: PTH112

__version__ = "0.2.0"

_places: dict[str, str] = {}


def _modules() -> dict[str, str]:
    """Return the module of each public name, as the stub imports it."""
    if _places:
        return _places
    # Only who uses a public name waits for these.
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    for statement in stub.body:
        if isinstance(statement, ast.ImportFrom):
            _places.update(dict.fromkeys((a.name for a in statement.names), str(statement.module)))
    return _places


def __getattr__(name: str) -> "Any":
    """Return a public name, imported when it is first used."""
    if name == "__all__":
        return __dir__()
    # What Python itself looks for is no public name, and asked often.
    module = "" if name.startswith("__") else _modules().get(name, "")
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    found = globals()[name] = getattr(import_module(module), name)
    return found


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*_modules(), "__version__"])
