"""`python -m strata.cli.serve.api_process`: an API server with its dashboard, or the API alone without jinja2.

Without jinja2 (extra `hub`) there is the API alone.
"""

from __future__ import annotations

import sys


def run_api_server() -> int:
    from importlib.util import find_spec

    from strata.train.api.__main__ import main

    if find_spec("jinja2") is None:
        return main(sys.argv[1:])
    from strata.web.lone import server_pages

    return main(sys.argv[1:], server_pages)


if __name__ == "__main__":
    sys.exit(run_api_server())
