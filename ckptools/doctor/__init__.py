"""`doctor`: the first questions about a checkpoint, and what to type next.

Nothing is imported here: the function of this name in `ckptools` takes this package's place there, which must be
loaded before it and costs nothing.
"""
