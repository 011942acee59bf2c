"""Findings of a comparison as lines of text."""

from collections.abc import Sequence

from foretoken.simulator.validation.finding import Finding


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return a paragraph for each finding; advice that was given is not given again."""
    given: set[str] = set()
    lines = []
    for item in findings:
        advice = "" if item.advice in given else f"\n  -> {item.advice}"
        given |= {item.advice, ""}
        lines.append(f"- {item.text}" + (advice if item.advice else ""))
    return lines
