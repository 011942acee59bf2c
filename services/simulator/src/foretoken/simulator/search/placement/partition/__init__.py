"""Ways to cut a chain of layers into stages: one file each."""
