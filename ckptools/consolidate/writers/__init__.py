"""consolidate/writers"""
