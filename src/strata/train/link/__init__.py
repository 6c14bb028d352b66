"""The links between the processes of a training server: msgpack on ZMQ sockets, and nothing is ever unpickled.

A process listens in a folder of its owner alone, or behind CURVE keys. Bytes that are no message of ours are logged and
dropped, so a process that can write to a socket cannot crash the one that reads from it.
"""
