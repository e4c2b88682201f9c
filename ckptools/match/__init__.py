"""`match`: why a checkpoint does not load, and the rename that fixes most.

Nothing is imported here: the function of this name in `ckptools` takes this package's place there, which must be
loaded before it and costs nothing.
"""
