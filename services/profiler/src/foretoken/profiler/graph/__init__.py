"""Profiles of a Hugging Face model by module, from the traced graph of its forward pass."""
