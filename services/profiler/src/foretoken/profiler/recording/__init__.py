"""What was timed, on its way to the catalog."""
