"""Surveys, converts and repairs checkpoints of whole models."""
