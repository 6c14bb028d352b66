"""What `strata init` finds in a folder, without running any of it, and the manifest or recipe that it writes."""
