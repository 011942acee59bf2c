"""Values as SQL writes them, where they cannot be bound."""


def quote(text: str) -> str:
    """Return a text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"
