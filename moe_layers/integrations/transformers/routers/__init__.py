"""Hooks the routers of transformers' models for statistics, losses, bias updates and replay."""
