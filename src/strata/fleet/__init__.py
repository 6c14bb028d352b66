"""Decides which host trains which job: the manifest, the queue, leases, hosts and artifacts."""
