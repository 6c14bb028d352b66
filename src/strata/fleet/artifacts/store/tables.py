"""The tables of artifacts in both databases."""

from __future__ import annotations

from typing import Final

from strata.database.migrations import Component

SQLITE: Final = Component(
    "artifact",
    (
        """
        CREATE TABLE artifact (
          seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, manifest BLOB NOT NULL,
          size INTEGER NOT NULL, committed_at REAL NOT NULL, pinned TEXT NOT NULL, removed_at REAL
        ) STRICT;
        CREATE TABLE artifact_chunk (
          number INTEGER PRIMARY KEY AUTOINCREMENT, digest TEXT NOT NULL UNIQUE, state TEXT NOT NULL,
          size INTEGER NOT NULL, wanted_at REAL NOT NULL, checked_at REAL NOT NULL
        ) STRICT;
        CREATE INDEX artifact_chunk_wanted ON artifact_chunk (state, wanted_at);
        CREATE INDEX artifact_chunk_checked ON artifact_chunk (state, checked_at);
        CREATE TABLE artifact_ref (
          chunk INTEGER NOT NULL REFERENCES artifact_chunk, artifact INTEGER NOT NULL REFERENCES artifact,
          PRIMARY KEY (chunk, artifact)
        ) WITHOUT ROWID, STRICT;
        CREATE INDEX artifact_ref_artifact ON artifact_ref (artifact);
        CREATE TABLE artifact_lineage (
          seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
          artifact_id TEXT NOT NULL REFERENCES artifact (id), committed_at REAL NOT NULL, kind TEXT NOT NULL,
          job_id TEXT NOT NULL, model TEXT NOT NULL, mode TEXT NOT NULL, body BLOB NOT NULL
        ) STRICT;
        CREATE INDEX artifact_lineage_artifact ON artifact_lineage (artifact_id);
        CREATE INDEX artifact_lineage_job ON artifact_lineage (job_id);
        CREATE INDEX artifact_lineage_model ON artifact_lineage (model, mode, kind);
        CREATE TABLE artifact_metric (
          lineage INTEGER NOT NULL, name TEXT NOT NULL, value REAL NOT NULL, PRIMARY KEY (lineage, name)
        ) WITHOUT ROWID, STRICT;
        CREATE TABLE artifact_parent (
          parent TEXT NOT NULL, lineage INTEGER NOT NULL, PRIMARY KEY (parent, lineage)
        ) WITHOUT ROWID, STRICT;
        CREATE TABLE artifact_blob (
          sha256 TEXT PRIMARY KEY, artifact_id TEXT NOT NULL REFERENCES artifact (id)
        ) WITHOUT ROWID, STRICT;
        CREATE INDEX artifact_blob_artifact ON artifact_blob (artifact_id);
        """,
        """
        ALTER TABLE artifact_lineage ADD COLUMN actor TEXT NOT NULL DEFAULT '';
        ALTER TABLE artifact_lineage ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
        UPDATE artifact_lineage SET epoch = json_extract(CAST(body AS TEXT), '$.epoch');
        """,
        # Whose quota an artifact counts against: of those from before, of the owner of the job that made it.
        """
        ALTER TABLE artifact ADD COLUMN owner TEXT NOT NULL DEFAULT '';
        UPDATE artifact SET owner = coalesce((
          SELECT j.owner FROM artifact_lineage l JOIN job j ON j.id = l.job_id WHERE l.artifact_id = artifact.id
          ORDER BY l.seq LIMIT 1), '');
        CREATE INDEX artifact_owner ON artifact (owner) WHERE removed_at IS NULL;
        """,
        """
        CREATE INDEX artifact_metric_value ON artifact_metric (name, value, lineage);
        DROP INDEX artifact_owner;
        CREATE INDEX artifact_owner ON artifact (owner, size) WHERE removed_at IS NULL;
        """,
        # Whose the names of data are: of the owner who used one first. Bytes that several uploaded have the name of one
        # of them; the key that committed is known of each, and the next commit with it gives its owner the name.
        """
        CREATE TABLE data_name (name TEXT PRIMARY KEY, owner TEXT NOT NULL) WITHOUT ROWID, STRICT;
        INSERT INTO data_name SELECT l.model, CASE WHEN a.owner <> '' AND NOT EXISTS (
            SELECT 1 FROM artifact_lineage o WHERE o.artifact_id = l.artifact_id AND o.actor <> l.actor) THEN a.owner
          WHEN l.actor LIKE 'key:%' THEN l.actor ELSE 'operator' END
          FROM artifact_lineage l JOIN artifact a ON a.id = l.artifact_id
          WHERE l.kind = 'data' AND l.model <> '' ORDER BY l.seq ON CONFLICT DO NOTHING;
        """,
        # Whose each lineage is, and which were withdrawn; who pinned.
        """
        ALTER TABLE artifact ADD COLUMN pinned_by TEXT NOT NULL DEFAULT '';
        ALTER TABLE artifact_lineage ADD COLUMN owner TEXT NOT NULL DEFAULT '';
        ALTER TABLE artifact_lineage ADD COLUMN removed_at REAL;
        UPDATE artifact_lineage SET owner = coalesce((SELECT j.owner FROM job j WHERE j.id = job_id),
          (SELECT a.owner FROM artifact a WHERE a.id = artifact_id)),
          removed_at = (SELECT a.removed_at FROM artifact a WHERE a.id = artifact_id);
        """,
        # How many names an owner has is counted when one is taken.
        "CREATE INDEX data_name_owner ON data_name (owner);",
        # Which chunks a training server has saved: knowing the digest of one is no right to its bytes.
        """
        ALTER TABLE artifact_chunk ADD COLUMN closed INTEGER NOT NULL DEFAULT 0;
        UPDATE artifact_chunk SET closed = 1 WHERE number IN (SELECT r.chunk FROM artifact_ref r
          JOIN artifact a ON a.seq = r.artifact JOIN artifact_lineage l ON l.artifact_id = a.id
          JOIN job j ON j.id = l.job_id WHERE l.kind = 'checkpoint'
          AND json_extract(CAST(j.spec AS TEXT), '$.kind') = 'server');
        """,
    ),
)
POSTGRES: Final = Component(
    "artifact",
    (
        """
        CREATE TABLE artifact (
          seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text COLLATE "C" NOT NULL UNIQUE,
          manifest bytea NOT NULL, size bigint NOT NULL, committed_at double precision NOT NULL, pinned text NOT NULL,
          removed_at double precision
        );
        CREATE TABLE artifact_chunk (
          number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, digest text COLLATE "C" NOT NULL UNIQUE,
          state text NOT NULL, size bigint NOT NULL, wanted_at double precision NOT NULL,
          checked_at double precision NOT NULL
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
          body bytea NOT NULL
        );
        CREATE INDEX artifact_lineage_artifact ON artifact_lineage (artifact_id);
        CREATE INDEX artifact_lineage_job ON artifact_lineage (job_id);
        CREATE INDEX artifact_lineage_model ON artifact_lineage (model, mode, kind);
        CREATE TABLE artifact_metric (
          lineage bigint NOT NULL, name text NOT NULL, value double precision NOT NULL, PRIMARY KEY (lineage, name)
        );
        CREATE TABLE artifact_parent (
          parent text COLLATE "C" NOT NULL, lineage bigint NOT NULL, PRIMARY KEY (parent, lineage)
        );
        CREATE TABLE artifact_blob (
          sha256 text COLLATE "C" PRIMARY KEY, artifact_id text COLLATE "C" NOT NULL REFERENCES artifact (id)
        );
        CREATE INDEX artifact_blob_artifact ON artifact_blob (artifact_id);
        """,
        """
        ALTER TABLE artifact_lineage ADD COLUMN actor text NOT NULL DEFAULT '';
        ALTER TABLE artifact_lineage ADD COLUMN epoch bigint NOT NULL DEFAULT 0;
        UPDATE artifact_lineage SET epoch = (convert_from(body, 'UTF8')::json ->> 'epoch')::bigint;
        """,
        # Whose quota an artifact counts against: of those from before, of the owner of the job that made it.
        """
        ALTER TABLE artifact ADD COLUMN owner text NOT NULL DEFAULT '';
        UPDATE artifact SET owner = coalesce((
          SELECT j.owner FROM artifact_lineage l JOIN job j ON j.id = l.job_id WHERE l.artifact_id = artifact.id
          ORDER BY l.seq LIMIT 1), '');
        CREATE INDEX artifact_owner ON artifact (owner) WHERE removed_at IS NULL;
        """,
        """
        CREATE INDEX artifact_metric_value ON artifact_metric (name, value, lineage);
        DROP INDEX artifact_owner;
        CREATE INDEX artifact_owner ON artifact (owner, size) WHERE removed_at IS NULL;
        """,
        # Whose the names of data are: of the owner who used one first. Bytes that several uploaded have the name of one
        # of them; the key that committed is known of each, and the next commit with it gives its owner the name.
        """
        CREATE TABLE data_name (name text COLLATE "C" PRIMARY KEY, owner text NOT NULL);
        INSERT INTO data_name SELECT l.model, CASE WHEN a.owner <> '' AND NOT EXISTS (
            SELECT 1 FROM artifact_lineage o WHERE o.artifact_id = l.artifact_id AND o.actor <> l.actor) THEN a.owner
          WHEN l.actor LIKE 'key:%' THEN l.actor ELSE 'operator' END
          FROM artifact_lineage l JOIN artifact a ON a.id = l.artifact_id
          WHERE l.kind = 'data' AND l.model <> '' ORDER BY l.seq ON CONFLICT DO NOTHING;
        """,
        # Whose each lineage is, and which were withdrawn; who pinned.
        """
        ALTER TABLE artifact ADD COLUMN pinned_by text NOT NULL DEFAULT '';
        ALTER TABLE artifact_lineage ADD COLUMN owner text NOT NULL DEFAULT '';
        ALTER TABLE artifact_lineage ADD COLUMN removed_at double precision;
        UPDATE artifact_lineage SET owner = coalesce((SELECT j.owner FROM job j WHERE j.id = job_id),
          (SELECT a.owner FROM artifact a WHERE a.id = artifact_id)),
          removed_at = (SELECT a.removed_at FROM artifact a WHERE a.id = artifact_id);
        """,
        # How many names an owner has is counted when one is taken.
        "CREATE INDEX data_name_owner ON data_name (owner);",
        # Which chunks a training server has saved: knowing the digest of one is no right to its bytes.
        """
        ALTER TABLE artifact_chunk ADD COLUMN closed integer NOT NULL DEFAULT 0;
        UPDATE artifact_chunk SET closed = 1 WHERE number IN (SELECT r.chunk FROM artifact_ref r
          JOIN artifact a ON a.seq = r.artifact JOIN artifact_lineage l ON l.artifact_id = a.id
          JOIN job j ON j.id = l.job_id WHERE l.kind = 'checkpoint'
          AND convert_from(j.spec, 'UTF8')::json ->> 'kind' = 'server');
        """,
    ),
)
