"""`inspect`: the format of a checkpoint, whether it is whole, and its contents."""
