"""The training server: a model that is trained by API."""
