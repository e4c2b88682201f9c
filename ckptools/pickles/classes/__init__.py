"""Rebuild the classes in checkpoints: tensors, ShardedTensor, DTensor, meshes, numpy."""
