"""`report`: one page of HTML about a checkpoint, to be mailed or kept.

Nothing is imported here: the function of this name in `ckptools` takes this package's place there, which must be
loaded before it and costs nothing.
"""
