"""The schema of artifacts in both databases: tables, indexes and numbered migrations."""

from __future__ import annotations

from typing import Final

from strata.database.migrations import Component

POSTGRES: Final = Component(
    "artifact",
    8,
    (
        # `artifact.owner`: whose quota it counts against. `data_name`: whose the names of data are, of the owner who
        # used one first. `artifact_lineage.removed_at`: when it was withdrawn. `artifact_chunk.closed`: a training
        # server has saved the chunk; knowing the digest of one is no right to its bytes.
        """
        CREATE TABLE artifact (
          seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text COLLATE "C" NOT NULL UNIQUE,
          manifest bytea NOT NULL, size bigint NOT NULL, committed_at double precision NOT NULL, pinned text NOT NULL,
          removed_at double precision, owner text NOT NULL DEFAULT '', pinned_by text NOT NULL DEFAULT ''
        );
        CREATE INDEX artifact_owner ON artifact (owner, size) WHERE removed_at IS NULL;
        CREATE TABLE artifact_chunk (
          number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, digest text COLLATE "C" NOT NULL UNIQUE,
          state text NOT NULL, size bigint NOT NULL, wanted_at double precision NOT NULL,
          checked_at double precision NOT NULL, closed integer NOT NULL DEFAULT 0
        ) WITH (fillfactor = 80);
        CREATE INDEX artifact_chunk_wanted ON artifact_chunk (state, wanted_at);
        CREATE INDEX artifact_chunk_checked ON artifact_chunk (state, checked_at);
        CREATE TABLE artifact_ref (
          chunk bigint NOT NULL REFERENCES artifact_chunk, artifact bigint NOT NULL REFERENCES artifact,
          PRIMARY KEY (chunk, artifact)
        );
        CREATE INDEX artifact_ref_artifact ON artifact_ref (artifact);
        CREATE TABLE artifact_lineage (
          seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text COLLATE "C" NOT NULL UNIQUE,
          artifact_id text COLLATE "C" NOT NULL REFERENCES artifact (id), committed_at double precision NOT NULL,
          kind text NOT NULL, job_id text COLLATE "C" NOT NULL, model text NOT NULL, mode text NOT NULL,
          body bytea NOT NULL, actor text NOT NULL DEFAULT '', epoch bigint NOT NULL DEFAULT 0,
          owner text NOT NULL DEFAULT '', removed_at double precision
        );
        CREATE INDEX artifact_lineage_artifact ON artifact_lineage (artifact_id);
        CREATE INDEX artifact_lineage_job ON artifact_lineage (job_id);
        CREATE INDEX artifact_lineage_model ON artifact_lineage (model, mode, kind);
        CREATE TABLE artifact_metric (
          lineage bigint NOT NULL, name text NOT NULL, value double precision NOT NULL, PRIMARY KEY (lineage, name)
        );
        CREATE INDEX artifact_metric_value ON artifact_metric (name, value, lineage);
        CREATE TABLE artifact_parent (
          parent text COLLATE "C" NOT NULL, lineage bigint NOT NULL, PRIMARY KEY (parent, lineage)
        );
        CREATE TABLE artifact_blob (
          sha256 text COLLATE "C" PRIMARY KEY, artifact_id text COLLATE "C" NOT NULL REFERENCES artifact (id)
        );
        CREATE INDEX artifact_blob_artifact ON artifact_blob (artifact_id);
        CREATE TABLE data_name (name text COLLATE "C" PRIMARY KEY, owner text NOT NULL);
        CREATE INDEX data_name_owner ON data_name (owner);
        """,
    ),
)
SQLITE: Final = POSTGRES.in_sqlite()
