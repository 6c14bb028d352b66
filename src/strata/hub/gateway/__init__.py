"""The hub in front of training servers that are jobs: forwards the tinker protocol and shows what the servers do."""
