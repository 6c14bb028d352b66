"""The agent of a host: claims jobs, runs each under a supervisor, reports to the hub, and survives restarts.

    probe -> claim -> prepare -> run -> upload streams, heartbeat, checkpoint -> upload -> complete or fail

Everything that a restart must not lose is on disk before the agent acts on it, and the child belongs to a process of
its own (`supervisor`), so an agent that is killed and started again finds its children, their logs and their exit
codes. The agent needs the base install only: HTTP and TLS are the standard library's, and it never imports what a
trainer imports.
"""
