"""The keys of a checkpoint for `tree` and `show`: a row for each, full values, places of shards."""
