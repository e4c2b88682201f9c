"""`ls`: list the checkpoints of a run, and find the newest whole one."""
