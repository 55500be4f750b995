"""Wrapping a model: DistributedDataParallel and what belongs to it."""
