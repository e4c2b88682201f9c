"""The content of a checkpoint, key by key: names, values, sharding, and the user's selection of keys."""
