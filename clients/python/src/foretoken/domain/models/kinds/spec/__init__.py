"""What every kind of layer is made of."""
