"""Ways to start the ranks of one node, one per file. Importing this does not import torch."""
