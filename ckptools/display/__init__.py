"""Rendering shared by all records: tables, lines, HTML pages, drawings, JSON."""
