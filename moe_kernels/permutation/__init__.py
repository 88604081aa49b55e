"""Conversion between token order and expert order."""
