"""Tensor values: read by region, compared, rounded, checksummed. Only `load` and conversions import torch."""
