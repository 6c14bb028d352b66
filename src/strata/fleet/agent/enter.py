"""The first program inside a sandbox: becomes the job's user, takes the job's environment variables, and executes its
command.

Bubblewrap and this program run before the job's user is taken, so they get an empty environment: a variable such as
LD_PRELOAD of a trainer would load the job's code into them. The supervisor passes this text to `python -I -S -c`, with
two descriptors: REQUEST has the command as JSON, STATUS takes `entered`, and the error if the command cannot be
executed. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys


def main(request: int, status: int) -> None:
    with os.fdopen(request, "rb") as file:
        spec = json.load(file)
    os.write(status, b"entered\n")
    os.set_inheritable(status, False)  # noqa: FBT003 - its only argument
    # Python ignores these, and what is ignored stays so in the next program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        if spec["uid"] is not None:
            os.setgroups(spec["groups"])
            os.setgid(spec["gid"])
            os.setuid(spec["uid"])
        os.umask(0o077)
        os.chdir(spec["cwd"])
        os.execvpe(spec["command"][0], spec["command"], spec["env"])  # noqa: S606 - that is its task
    except (OSError, ValueError) as error:
        failure = {"error": str(error), "errno": getattr(error, "errno", None)}
        os.write(status, json.dumps(failure).encode())
        os._exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
