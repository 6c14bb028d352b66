"""The HTTP server under hub and training server: routes, reading, authentication, errors, OpenAPI, the process."""
