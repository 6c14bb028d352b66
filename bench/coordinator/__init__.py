"""The coordinator beside a bare gRPC server."""
