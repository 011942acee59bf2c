"""Measurements for Foretoken: the folder `data`, made by `starter/make_starter.py`."""

__version__ = "0.1.0"
