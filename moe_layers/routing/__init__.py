"""Routers and assignments, which decide which experts compute a token."""
