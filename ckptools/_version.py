"""The version of ckptools, as in its JSON."""

__version__ = "0.1.0"
