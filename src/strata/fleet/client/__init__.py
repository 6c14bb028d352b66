"""The hub's client: for the agent, the commands and the SDK; standard library and base install only."""
