"""`strata serve`: run a training server, or show what one does."""
