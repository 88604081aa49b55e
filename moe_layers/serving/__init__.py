"""Weights of a trained model for the engine that serves it."""

from .buckets import Bucket, checksum, pack
from .streaming import iter_weights

__all__ = ["Bucket", "checksum", "iter_weights", "pack"]
