"""Routers: one module each, with a `ROUTER`."""
