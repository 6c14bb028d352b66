"""What runs on the ranks: the model, its adapters and losses, and rank 0's side of the link. The only user of torch."""
