"""`doctor`: answer the first questions about a checkpoint, and propose the next commands.

This file imports nothing: `import ckptools` loads it so that `ckptools.doctor` can name the function afterwards.
"""
