"""FSDP1's flat parameters: recognised, explained by shapes, taken apart; and their optimizer state."""
