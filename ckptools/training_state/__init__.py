"""The meaning of a tree to a trainer: which parameter a piece of optimizer state belongs to."""
