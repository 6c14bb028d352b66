"""The coordinator on the wire: a gRPC server, its identities and its status codes."""
