"""Routers and assignments: the decision which experts compute a token."""
