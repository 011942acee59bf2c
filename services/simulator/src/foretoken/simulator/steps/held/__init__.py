"""What is held for a step and when: states, and tensors from a forward pass to its backward one."""
