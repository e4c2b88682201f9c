"""Pictures of records, as SVG and in words."""
