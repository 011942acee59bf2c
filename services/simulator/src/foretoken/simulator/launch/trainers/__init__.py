"""One training framework per file: how it is started."""
