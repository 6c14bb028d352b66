"""The coordinator process: the service that leads one partition, and its gRPC edge."""
