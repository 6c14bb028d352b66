"""Checkpoints as they lie on the disk: what may be in one, how it comes to be there whole, how it is believed.

Ranks write them; API server and orchestrator read, keep and remove them. So nothing here may need torch.
"""
