"""Several processes, on one machine or many, share one command: each finds its rank and meets the others."""
