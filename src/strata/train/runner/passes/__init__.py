"""forward_backward on a rank: partition into packed rows, log probabilities, losses, gradients, optimizer steps."""
