"""What clients read: queries, views of the state, and the read models that are kept beside it; pure, as the core is."""
