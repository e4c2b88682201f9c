"""`watch`: stay with a run, prove each new checkpoint, and say what is wrong with it.

Nothing is imported here: the function of this name in `ckptools` takes this package's place there, which must be
loaded before it and costs nothing.
"""
