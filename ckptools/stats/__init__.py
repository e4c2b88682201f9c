"""`stats`: figures of values, streamed from the shards in bounded memory. numpy is imported here, and torch nowhere.

Nothing is imported here: the function of this name in `ckptools` takes this package's place there, which must be
loaded before it and costs nothing.
"""
