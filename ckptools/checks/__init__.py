"""Checks of whether a checkpoint is whole, unharmed and coherent: one file per subject. Nothing is written."""
