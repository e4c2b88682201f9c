"""The comparison of two checkpoints of any formats and world sizes, key by key."""
