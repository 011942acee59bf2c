"""What operators see of a process: logs, spans, and a line for each call."""
