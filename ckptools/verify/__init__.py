"""`verify`: run every check on a checkpoint, writing nothing.

This file imports nothing: `import ckptools` loads it so that `ckptools.verify` can name the function afterwards.
"""
