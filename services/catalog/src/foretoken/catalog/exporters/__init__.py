"""One module per format, each with an `EXPORTER`."""
