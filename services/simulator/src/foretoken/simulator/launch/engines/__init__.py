"""Servers that can be started: one module each, with an `ENGINE`."""
