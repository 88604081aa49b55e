"""Routers, and what decides which expert computes which token."""
