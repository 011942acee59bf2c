"""Serving engines and training frameworks, version by version: what they can, how they run."""
