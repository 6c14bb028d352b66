"""The pure heart of the training server: operations, their order, their packing, their futures. No I/O, no clock."""
