"""What the kernels of attention share: batches, caches, libraries."""
