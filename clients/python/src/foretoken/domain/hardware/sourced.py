"""Numbers in the data files carry their source: `{value: 933.0e9, source: datasheet}`."""

from collections.abc import Mapping
from typing import Any

from foretoken.domain.errors import FieldViolation, InvalidRequestError


def strip_sources(content: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the content with every `{value, source}` replaced by its value.

    Raises:
        InvalidRequestError: a number without a source, or a source the file does not list under
            `sources`.

    """
    sources = content.get("sources", {})
    violations: list[FieldViolation] = []
    stripped = {
        key: _strip(item, key, sources, violations)
        for key, item in content.items()
        if key != "sources"
    }
    if violations:
        lines = "; ".join(f"{v.field}: {v.description}" for v in violations)
        raise InvalidRequestError(f"{origin}: {lines}", violations)
    return stripped


def _strip(
    item: Any, path: str, sources: Mapping[str, str], violations: list[FieldViolation]
) -> Any:
    if isinstance(item, Mapping) and set(item) == {"value", "source"}:
        if item["source"] not in sources:
            violations.append(FieldViolation(path, f"source {item['source']!r} is not listed"))
        return item["value"]
    if isinstance(item, Mapping):
        return {key: _strip(i, f"{path}.{key}", sources, violations) for key, i in item.items()}
    if isinstance(item, int | float) and not isinstance(item, bool):
        violations.append(FieldViolation(path, "a number needs {value, source}"))
    return item
