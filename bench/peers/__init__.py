"""TuFT's published package beside the training server."""
