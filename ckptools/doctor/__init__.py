"""`doctor`: is a checkpoint whole, the newest of its run, loadable, in step? Propose the next commands.

This file imports nothing: `import ckptools` loads it so that `ckptools.doctor` can name the function afterwards.
"""
