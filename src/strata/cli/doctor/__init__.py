"""`strata doctor`: what a person stumbles over, looked at before it happens."""
