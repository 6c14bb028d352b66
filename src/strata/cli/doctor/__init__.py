"""`strata doctor`: diagnoses this machine, the agent and the hub before a problem stops work."""
