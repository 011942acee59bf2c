"""Rows, lists and snapshots out."""
