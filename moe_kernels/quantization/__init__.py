"""Weights stored in few bits: their formats, quantisation and exact dequantisation."""
