"""Script jobs, a gang, a sweep and a training server on one hub, whose processes are killed."""
