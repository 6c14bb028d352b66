"""Agents, their children and the hub, killed and frozen together: `make soak CAMPAIGN=fleet-agent-kill KILLS=300`."""
