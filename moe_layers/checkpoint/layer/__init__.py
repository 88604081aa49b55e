"""Loads one layer from a checkpoint, and saves one layer as a checkpoint."""
