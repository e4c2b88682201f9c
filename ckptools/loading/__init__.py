"""Load a checkpoint of any format into a running model, without writing another checkpoint first."""
