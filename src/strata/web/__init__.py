"""The dashboard: pages for people, rendered by the server from replies of the public API, and nothing else.

A page never reads a store: it calls the API as the person who looks at it, so it shows what that person may see.
"""
