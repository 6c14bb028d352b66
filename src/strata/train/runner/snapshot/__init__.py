"""Snapshots of everything the ranks hold: copied, written while training continues, and restored."""
