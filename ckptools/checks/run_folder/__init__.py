"""The checkpoints of a run: found, looked into, and the newest whole one proven to be that."""
