"""The protobuf and gRPC code of proto/strata/v1/coordinator.proto, written by `make proto` and by nobody else."""
