"""consolidate"""
