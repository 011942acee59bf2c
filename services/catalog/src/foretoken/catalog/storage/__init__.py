"""Where the tables lie, and how they are opened, locked down and written."""
