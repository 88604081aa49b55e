"""Experts of transformers' models that ranks share."""
