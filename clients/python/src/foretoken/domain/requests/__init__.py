"""What is asked: deployments, training runs, workloads, searches."""
