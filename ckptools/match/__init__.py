"""`match`: why a checkpoint does not load, and the rename that fixes most."""
