"""Consolidation of many shards into one file: choose, plan, copy, publish; `run` has the steps in order.

Nothing is imported here: the function of this name in `ckptools` takes this package's place there, which must be
loaded before it and costs nothing.
"""
