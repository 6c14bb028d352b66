"""A release and this version side by side: each part is killed and started again by the other version, under load."""
