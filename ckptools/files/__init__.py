"""Bytes on disk: what a file is, and how it is opened safely."""
