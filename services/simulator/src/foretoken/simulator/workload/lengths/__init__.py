"""Distributions of token counts: one module each, with a `LENGTH`."""
