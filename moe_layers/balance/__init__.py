"""Losses, selection bias and statistics of the routing."""

from .routing_statistics import RoutingObserver, RoutingStatistics

__all__ = ["RoutingObserver", "RoutingStatistics"]
