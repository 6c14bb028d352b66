"""DLRover's published package beside the coordinator."""
