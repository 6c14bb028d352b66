"""Strata turns the machines you own into one training service."""

__version__ = "0.2.0"
