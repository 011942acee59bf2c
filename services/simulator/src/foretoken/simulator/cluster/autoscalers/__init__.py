"""Autoscaling policies: one module each, with an `AUTOSCALER`."""
