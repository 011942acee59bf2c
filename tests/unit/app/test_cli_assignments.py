"""`NAME=VALUE` words of a command: each name once."""

import pytest
import typer

from foretoken.app.cli.state import parse_assignments


def test_words_become_names_and_values() -> None:
    assert {"m": "1", "path": "a=b", "empty": ""} == parse_assignments(
        ["m=1", "path=a=b", "empty="]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m"], "expected NAME=VALUE, found 'm'"),
        (["=1"], "expected NAME=VALUE, found '=1'"),
        (["m=1", "n=1", "m=2"], "m is given twice: '1' and '2'"),
    ],
)
def test_a_word_that_cannot_be_used_is_named(words: list[str], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        parse_assignments(words)
