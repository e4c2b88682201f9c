"""Records of `tree` and `show`: the keys of a checkpoint, their values, and where the shards of tensors lie."""
