"""Replay a workload against an OpenAI-compatible server, and record what its client saw."""
