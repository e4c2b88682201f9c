"""`match`: explain why a checkpoint does not load into a model, and find the rename that fixes most names.

This file imports nothing: `import ckptools` loads it so that `ckptools.match` can name the function afterwards.
"""
