"""A short module for each command: its arguments, the call that makes its record, and the output."""
