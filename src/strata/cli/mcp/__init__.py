"""`strata mcp`: a hub as tools of the Model Context Protocol, for programs that act for people (AI agents)."""
