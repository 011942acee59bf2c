"""Trace formats: one module each, with a `TRACE`."""
