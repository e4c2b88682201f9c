"""FSDP1's flat parameters: the parameters in them, the places of each rank's shards, and their optimizer state."""
