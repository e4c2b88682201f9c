"""Going on from a checkpoint: which one, what a run needs of it, and its options."""
