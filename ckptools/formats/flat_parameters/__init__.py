"""FSDP1's flat parameters: which parameters are in them, where each rank's shards lie, and their optimizer state."""
