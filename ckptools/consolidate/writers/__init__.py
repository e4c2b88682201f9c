"""consolidate/writers."""
