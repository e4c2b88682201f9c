"""Why a checkpoint does not load: its names and shapes beside those of a model, and the rename between them."""
