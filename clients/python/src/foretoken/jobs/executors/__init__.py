"""Where tasks run: in this thread, in processes of this machine, or on a Ray cluster."""
