"""Everything that imports torch to load a file."""
