"""Adapters in PEFT's file format: names of layers and files, and the import of adapters made elsewhere."""
