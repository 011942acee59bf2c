"""From an answer to a deployment: the files that start it and measure it."""
