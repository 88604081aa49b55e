"""Checkpoints of whole models: survey, conversion, repair."""
