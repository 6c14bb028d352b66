"""The agent of a host: claims jobs, runs them as children, says how they go, and outlives its own death.

    probe -> claim -> prepare -> run -> stream, renew, checkpoint -> upload -> complete or fail

Everything it must not forget is on disk before it is acted on, and the child belongs to a process of its own
(`waiter`), so an agent that is killed and started again finds its children, their logs and their exit codes. It needs
the base install only: HTTP and TLS are the standard library's, and it never imports what a trainer imports.
"""
