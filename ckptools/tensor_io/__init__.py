"""Values on disk: their checksums, and whether they are finite numbers. Nothing here imports torch."""
