"""The keys of scenarios as a document shows them: their fields, with what these say of themselves.

`python -m foretoken.app.scenario_keys PAGE` writes them into a page.
"""

import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from foretoken.domain import schema
from foretoken.domain.requests.option import Option, options_of
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario

# The blocks of the page by what its fence says.
BLOCKS = {"serving-scenario": ServingScenario, "training-scenario": TrainingScenario}


def render_keys(cls: type, indent: str = "") -> Iterator[str]:
    """Yield the described fields of a dataclass as lines of YAML, its sections after their key."""
    described = options_of(cls)
    for item in fields(cls):
        said = described.get(item.name)
        if said is None:
            continue
        hint: Any = schema.field_types(cls)[item.name]
        is_section = is_dataclass(hint) and bool(options_of(cast("type", hint)))
        if is_section and said.example is None:
            yield f"{indent}{item.name}:  # {said.text}"
            yield from render_keys(hint, f"{indent}  ")
        else:
            yield f"{indent}{item.name}: {_value(item, said)}  # {said.text}"


def render_page(text: str) -> str:
    """Return the page with its blocks made anew."""
    for name, cls in BLOCKS.items():
        fence = f"```yaml {name}\n"
        before, _, rest = text.partition(fence)
        _, _, after = rest.partition("```")
        text = "".join([before, fence, *(f"{line}\n" for line in render_keys(cls)), "```", after])
    return text


def _value(item: Field[Any], said: Option) -> str:
    value = said.example
    if value is None:
        value = item.default if item.default_factory is MISSING else item.default_factory()
    plain = schema.encode(value)
    dumped = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=1000)
    return dumped.removesuffix("...\n").strip() if plain != "" else '""'


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(render_page(page.read_text(encoding="utf-8")), encoding="utf-8")
