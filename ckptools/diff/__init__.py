"""`diff`: compare two checkpoints of any formats and world sizes.

This file imports nothing: `import ckptools` loads it so that `ckptools.diff` can name the function afterwards.
"""
