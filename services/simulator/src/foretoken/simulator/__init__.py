"""Evaluates inference deployments and training configurations."""
