"""`verify`: every check of a checkpoint, a file per subject. Nothing is written.

Nothing is imported here: the function of this name in `ckptools` takes this package's place there, which must be
loaded before it and costs nothing.
"""
