"""Consolidation of many shards into one file: choose, plan, copy, publish; `run` has the steps in order.

This module imports nothing. In `ckptools` the function `consolidate` takes this package's name, so the package must be
loaded before the function is set; while it is empty, loading it costs nothing.
"""
