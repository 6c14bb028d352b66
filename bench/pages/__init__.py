"""The dashboard of a large fleet."""
