"""The version of ckptools, which is in its JSON."""

__version__ = "0.1.0"
