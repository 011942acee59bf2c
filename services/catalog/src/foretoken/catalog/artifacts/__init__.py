"""Files of other services: checked, stored, read, activated and deleted."""
