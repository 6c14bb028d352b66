"""The protobuf code of proto/strata/train/v1/tinker.proto, written by `make proto` and by nobody else."""
