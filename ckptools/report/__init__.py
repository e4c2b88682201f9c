"""`report`: write one HTML page about a checkpoint, to be mailed or kept.

This file imports nothing: `import ckptools` loads it so that `ckptools.report` can name the function afterwards.
"""
