"""Every message of the hub's HTTP interface, declared once, by resource: for the hub, the agent, the command line and
the SDK.

Times between machines are spans (`expires_in_s`), because their clocks differ; `…_at_s` is the hub's wall clock and is
for showing only. Who calls is never in a message: it follows from the credentials.
"""
