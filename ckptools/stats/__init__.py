"""`stats`: figures of values, streamed from the shards in bounded memory. numpy is imported here, and torch nowhere."""
