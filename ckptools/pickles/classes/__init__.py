"""Rebuilding the classes that checkpoints hold: tensors, ShardedTensor, DTensor, meshes, numpy."""
