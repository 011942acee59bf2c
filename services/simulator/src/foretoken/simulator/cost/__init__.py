"""What the latency surfaces of a deployment are made of."""
