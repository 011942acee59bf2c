"""Calls that several ranks make together, on one node or on several."""
