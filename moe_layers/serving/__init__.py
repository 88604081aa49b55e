"""Yields and packs the weights of a trained model for the inference engine that serves the model."""

from .buckets import Bucket, checksum, pack
from .streaming import iter_weights

__all__ = ["Bucket", "checksum", "iter_weights", "pack"]
