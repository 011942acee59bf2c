"""What a training step occupies on each device, followed over the pipeline's schedule."""
