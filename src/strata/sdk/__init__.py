"""What people and their programs use to reach a hub. Stands on the standard library and msgspec."""
