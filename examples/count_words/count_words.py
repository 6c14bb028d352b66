"""Counts the words of text files with as many workers as are started; every line counts once per epoch.

    strata coordinator --listen 127.0.0.1:7070 --database sqlite:coord.db &
    python examples/count_words/count_words.py --out counts *.txt &      # as often as you like
    python examples/count_words/count_words.py --out counts *.txt

A worker writes what it counted in a shard before it asks for the next one, under the name of the shard's lease. Kill a
worker: others get what it had not finished. Kill the coordinator and start it again: the workers wait for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import strata.coord.worker as strata


def count(shard: strata.Shard) -> Counter[str]:
    words: Counter[str] = Counter()
    for line in shard.open():
        words.update(line.split())
    return words


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--shard-size", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True, help="directory of the counts, one file for each shard")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)

    total: Counter[str] = Counter()
    with strata.join(elastic=True) as worker:
        worker.dataset("corpus", given.files, shard_size=given.shard_size)
        for epoch in worker.epochs(given.epochs):
            for shard in worker.shards("corpus", epoch):
                words = count(shard)
                (given.out / f"{shard.epoch}-{shard.lease_id}.json").write_text(json.dumps(words), encoding="utf-8")
                total += words
    sys.stdout.write(f"this worker counted {total.total()} words\n")


if __name__ == "__main__":
    main()
