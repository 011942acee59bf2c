"""Turns simulation reports into pages, pictures and traces."""
