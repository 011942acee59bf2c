"""What learns the latency of one series: its members, and how they are mixed."""
