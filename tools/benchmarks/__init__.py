"""`make bench`: ckptools against cp, torch.load and torch's own converter, on real checkpoints, in the same minute."""
