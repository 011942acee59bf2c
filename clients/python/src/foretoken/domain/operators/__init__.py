"""One module per operator, each with a `SPEC`."""
