"""Who is calling: the certificate authority, host certificates, join tokens, API keys, roles. Below all layers."""
