"""Put or delete a checkpoint in an object store, and die at a failpoint: `… putting NAME ACTION FOLDER BUCKET`.

The address and the keys of the store come from the environment.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from obstore.store import S3Store

from strata.base import failpoint
from strata.objects import Bucket
from strata.train.checkpoints.object_store import CheckpointStore

if __name__ == "__main__":
    name, action, folder, bucket = sys.argv[1:]
    store = CheckpointStore(Bucket(S3Store(bucket, client_options={"allow_http": True}), "p"))
    failpoint.arm(name, failpoint.kill)
    asyncio.run(store.put(Path(folder), "r/weights/a@1") if action == "put" else store.delete("r/weights/a@1"))
