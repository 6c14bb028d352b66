"""One hub's fleet, in a part for each kind of caller: the HTTP routes and the hub's loops. It knows time and waiting,
and no HTTP.
"""
