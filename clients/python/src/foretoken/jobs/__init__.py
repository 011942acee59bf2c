"""Long work of the services: queued, run in processes of its own, watched, kept on disk."""
