"""The model part of `strata demo`: a training server that is a job, and the job that trains on it."""
