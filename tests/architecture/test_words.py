"""Prose uses the field's words: documents, help, messages, docstrings and comments.

The table has what a reader of other projects' documentation would stumble over, and what to write.
"""

import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

# What is not written, and what is written instead.
_INSTEAD: Mapping[str, str] = {
    r"\btold\b": "predicted, estimated from, reported, stated",
    r"\b(?:un)?doubt(?:s|ed|ful|fully)?\b": "flag, flagged, uncertain",
    r"\bbeside\b": "next to, in addition to, compared with, concurrent with",
    r"\basks\b": "requests, queries, requires",
    r"\bhonest\w*": "calibrated; a check",
    r"\b(?:is|are) of ,(?=\W)": "requires the option",
    r"(?:^|[.;:#\"] )Who(?= \w+s\b)(?![^.]*\?)": "a user who, a client that",
}
# No text without one of these has any of them; looking for these is quick, taking a file apart not.
_HINT = re.compile(r"(?i:told|doubt|beside|asks|honest|\b(?:is|are)\s+of\b)|\bWho\s")

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Code, and where links lead.
_NO_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)")
_FIELD = re.compile(r"\{[^}]*\}")
_SQL = re.compile(r"\b(?:SELECT|UPDATE|INSERT|DELETE|JOIN)\b")


def find_words(text: str) -> Iterator[str]:
    """Yield what of the table is in a text, each with its place and what to write."""
    prose = _NO_PROSE.sub(",", _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text))
    flat = re.sub(r"[ \n]+", " ", _FIELD.sub("x", prose))
    for pattern, instead in _INSTEAD.items():
        for match in re.finditer(pattern, flat, re.IGNORECASE if "Who" not in pattern else 0):
            around = flat[max(0, match.start() - 40) : match.end() + 30].strip()
            yield f"...{around}... : write {instead}"


def prose_of(path: Path) -> str:
    """Return a document's text, or the comments and sentences in a module's strings.

    Nothing of what has no word of the table.
    """
    text = path.read_text(encoding="utf-8")
    if not _HINT.search(text):
        return ""
    if path.suffix == ".md":
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    wanted = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
    # A string without a space is a name.
    texts = [t.string for t in tokens if t.type in wanted and " " in t.string.strip()]
    return "\n\n".join(text for text in texts if not _SQL.search(text))


def test_documents_and_code_use_the_words_of_the_field(
    repository: Path, repository_files: list[Path]
) -> None:
    names = {str(p.relative_to(repository)): p for p in repository_files}
    checked = {
        name: path
        for name, path in names.items()
        if path.suffix in (".md", ".py") and not name.startswith("clients/python/gen/")
    }
    assert {"README.md", "deploy/release.py"} < set(checked)
    found = [
        f"{name}: {word}"
        for name, path in checked.items()
        if path != Path(__file__)
        for word in find_words(prose_of(path))
    ]
    assert [] == found, "\n".join(found)


@pytest.mark.parametrize(
    "sentence",
    [
        "A step is told to take 3 ms.",
        "Rows in\ndoubt are left out.",
        "What a host takes beside the kernels.",
        "The simulator asks the predictor.",
        "An honest interval.",
        "These are of `--nodes`.",
        "It ends. Who has the services in his own process does not wait.",
        "It ends. Who\nhas the services in his own process does not wait.",
    ],
)
def test_a_sentence_of_before_is_found(sentence: str) -> None:
    assert 1 == len(list(find_words(sentence)))
    assert _HINT.search(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "A step is predicted to take 3 ms; ask for `doubt` and `foretoken.beside`.",
        "See [the note](0023-acknowledged-beside-the-file.md).",
        "A list of `--nodes`. Who can call it?",
        "```text\nasks beside\n```\n",
    ],
)
def test_a_sentence_of_now_is_left(sentence: str) -> None:
    assert [] == list(find_words(sentence))
