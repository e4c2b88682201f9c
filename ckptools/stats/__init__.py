"""`stats`: compute statistics of tensor values, streamed from the shards in bounded memory, with numpy alone.

This file imports nothing: `import ckptools` loads it so that `ckptools.stats` can name the function afterwards.
"""
