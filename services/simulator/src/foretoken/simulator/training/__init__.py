"""Simulates one optimizer step of a training configuration."""
