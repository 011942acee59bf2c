"""Read-only questions in SQL."""
