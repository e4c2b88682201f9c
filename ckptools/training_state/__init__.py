"""What a tree means to somebody who trains: which parameter a piece of optimizer state belongs to."""
