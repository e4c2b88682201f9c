"""`watch`: follow a run, verify each new checkpoint, and report problems.

This file imports nothing: `import ckptools` loads it so that `ckptools.watch` can name the function afterwards.
"""
