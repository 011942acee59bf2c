"""Schedulers: one module each, with a `select`."""
