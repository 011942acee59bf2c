"""Profile on the nodes of a Kubernetes cluster, from a machine that needs no torch."""
