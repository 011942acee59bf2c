"""Tests of stored rows against each other: one file each."""
