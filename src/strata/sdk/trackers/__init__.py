"""Copies of metrics for experiment trackers: one port, an adapter for each tracker, and the mirror that feeds them."""
