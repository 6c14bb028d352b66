"""Ask, with whichever version of the SDK runs this, where the archive of a checkpoint is. Prints the address."""

from __future__ import annotations

import sys
from typing import Any

import tinker

# Not in the newest version, whose types are those that are known here.
client: Any = tinker.ServiceClient().create_rest_client()
found = client.get_checkpoint_archive_url_from_tinker_path(sys.argv[1]).result()
sys.stdout.write(found.url)
