"""The fleet beside bare databases and an empty route."""
