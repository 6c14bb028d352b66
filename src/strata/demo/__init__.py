"""What `strata demo` runs and shows: its folder, the process that ends everything, the trainers, and the checks by the
hub's API."""
