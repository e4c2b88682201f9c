"""Tensor values: read by region, compared, rounded, checksummed. torch is imported only to make its tensors."""
