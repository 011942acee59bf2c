"""Training on a cluster of several devices: which stages run where, and how layers are cut."""
