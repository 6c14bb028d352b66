"""What training leaves behind: files as verified chunks, manifests that name them, and where each came from."""
