"""Backup, restore, pruning and compaction."""
