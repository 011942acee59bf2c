"""What a search was asked, and the scenarios of its finalists, at the end of its page."""

import json
from collections.abc import Sequence

from foretoken.page.section import Section


def request_sections(
    request_json: str, intro: str, finalists: Sequence[str], use: str
) -> list[Section]:
    """Return the resolved request and the finalists' scenarios (as JSON), both folded.

    `use` says what can be done with one of the scenarios.
    """
    request = json.loads(request_json) if request_json else {}
    sections = [Section(title="Request", intro=intro, listing=_listing(request))]
    scenarios = [json.loads(scenario) for scenario in finalists if scenario]
    if scenarios:
        sections.append(
            Section(
                title="Scenarios of the finalists",
                intro=f"Each as it was simulated, in order of the table; {use}",
                listing=_listing(scenarios),
            )
        )
    return sections


def _listing(content: object) -> str:
    return json.dumps(_shorten(content), indent=2, ensure_ascii=False)


def _shorten(content: object) -> object:
    """Return the content with an inlined trace shortened to its length."""
    if isinstance(content, list):
        return [_shorten(item) for item in content]
    if not isinstance(content, dict):
        return content
    return {
        key: f"{len(value)} requests, not shown"
        if key == "trace_requests" and value
        else _shorten(value)
        for key, value in content.items()
    }
