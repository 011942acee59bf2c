"""One module per parallel axis, each with a `PASS` that cuts an operator graph along it."""
