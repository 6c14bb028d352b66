"""`strata gang`: the operator's commands on one job, its live screen, and the text of both."""
