"""The journal beside the bare database drivers."""
