"""Weights stored in few bits: their formats, quantisation and exact dequantisation."""

from ..types import QuantizedWeight, WeightFormat

__all__ = ["QuantizedWeight", "WeightFormat"]
