"""Checkpoints: folders on the disk, tar archives, and copies in object storage.

Ranks write them; API server and orchestrator read, keep and remove them. So nothing here may need torch.
"""
