"""`--hollow FROM`: a checkpoint whose metadata is that of a large model, and whose values are holes in its files."""
