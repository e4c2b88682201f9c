"""One thin file per command: its arguments, what it asks, and what it prints."""
