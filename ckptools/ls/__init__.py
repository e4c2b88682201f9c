"""`ls`: the checkpoints of a run, and which of them is the newest whole one."""
