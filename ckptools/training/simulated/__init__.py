"""Checkpoints that no run has made: ranks of a simulated world, and hollow files of a large model (`--hollow FROM`)."""
