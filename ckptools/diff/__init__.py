"""`diff`: what differs between two checkpoints of any formats and world sizes.

Nothing is imported here: the function of this name in `ckptools` takes this package's place there, which must be
loaded before it and costs nothing.
"""
