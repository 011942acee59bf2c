"""Every metric once: its name, label, unit, definition, which way is better and where it is shown.

Reports, tables, comparisons, the text of commands and docs/reference/metrics.md follow from it.
"""
