"""Strata turns the machines you own into one training service."""

__version__ = "0.3.0.dev0"
