"""The schema of the fleet in PostgreSQL: tables, indexes, numbered migrations, and the order in which rows are locked.

Order of locks, so that no two transactions wait for each other: a job's row first, then its lease, its place in the
queue, its attempt. A claim cannot know its job before it looks, so it takes queue row and job row together and passes
over those it would have to wait for.
"""

from __future__ import annotations

from typing import Final

from strata.database.migrations import Component

MAY_SERVE: Final = """position('"kind":"server"'::bytea IN spec) > 0"""
"""A spec with the text of that kind in it; also one that has it among its hyper-parameters."""
COMPONENT: Final = Component(
    "fleet",
    20,
    (
        # What each table is for stands with the tables of SQLite. Here:
        # `attempt_open` is by an expression that no other index has: for a plan that is made while the table is empty,
        # the planner would take any index with the host in it, and read all of that.
        # `open_claims` reads by queries of its own after the lock, because the statement around it sees the snapshot
        # from before the lock. It returns what is reserved like an attempt.
        # A change adds rows to `job_count`, so that no two transactions wait for one row; `COMPACT_COUNTS` sums them.
        f"""
        CREATE TABLE req_class (
          id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL UNIQUE, spec bytea NOT NULL
        );
        CREATE TABLE trainer (digest text PRIMARY KEY, spec bytea NOT NULL);
        CREATE TABLE trainer_name (
          project text NOT NULL, name text NOT NULL, digest text NOT NULL REFERENCES trainer,
          PRIMARY KEY (project, name)
        );
        CREATE TABLE policy (host text PRIMARY KEY, spec bytea NOT NULL, project text NOT NULL DEFAULT 'default');
        CREATE TABLE project (name text PRIMARY KEY, owner text NOT NULL, made_at double precision NOT NULL);
        CREATE TABLE quota (owner text PRIMARY KEY, spec bytea NOT NULL);
        CREATE TABLE job (
          seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text COLLATE "C" NOT NULL UNIQUE, spec bytea NOT NULL,
          class_id bigint NOT NULL REFERENCES req_class, status text NOT NULL, epoch bigint NOT NULL,
          created_at double precision NOT NULL, changed_at double precision NOT NULL,
          not_before double precision NOT NULL, host_id text NOT NULL, reason text NOT NULL, artifact text NOT NULL,
          declared boolean NOT NULL, orphaned boolean NOT NULL, waits_for integer NOT NULL, model text NOT NULL,
          sweep text NOT NULL, priority integer NOT NULL, trainer text NOT NULL, charged integer NOT NULL,
          lost integer NOT NULL, excused integer NOT NULL, checkpoint text NOT NULL,
          attempts integer NOT NULL DEFAULT 0, project text NOT NULL DEFAULT 'default',
          trainer_digest text NOT NULL DEFAULT '', submitted_by text NOT NULL DEFAULT '',
          infra integer NOT NULL DEFAULT 0, owner text NOT NULL DEFAULT '', label text NOT NULL DEFAULT '',
          archived boolean NOT NULL DEFAULT false, superseded boolean NOT NULL DEFAULT false,
          gang text NOT NULL DEFAULT ''
        ) WITH (fillfactor = 80);
        CREATE INDEX job_unfinished ON job (status, id) WHERE status <> 'pending';
        CREATE INDEX job_host ON job (host_id, id) WHERE host_id <> '';
        CREATE INDEX job_label ON job (label, project, seq);
        CREATE INDEX job_owner ON job (owner) WHERE status IN ('pending', 'claimed', 'running');
        CREATE INDEX job_gang ON job (gang) WHERE gang <> '';
        CREATE INDEX job_gang_open ON job (gang) WHERE gang <> '' AND status IN ('pending', 'claimed', 'running');
        CREATE INDEX job_sweep ON job (project, sweep, status, changed_at, archived, superseded) WHERE sweep <> '';
        CREATE INDEX job_ended ON job (changed_at, seq) WHERE status IN ('completed', 'failed', 'cancelled');
        CREATE INDEX job_failed ON job (changed_at, seq) WHERE status = 'failed';
        CREATE INDEX job_server ON job (id) WHERE {MAY_SERVE};
        CREATE INDEX job_search ON job (seq) INCLUDE (label, owner, project, model, sweep);
        CREATE INDEX job_held ON job (seq, project, status) WHERE status IN ('claimed', 'running');
        CREATE TABLE job_after (job_id text NOT NULL, needs text NOT NULL, PRIMARY KEY (job_id, needs));
        CREATE INDEX job_after_needs ON job_after (needs, job_id);
        CREATE TABLE job_refusal (host_id text NOT NULL, seq bigint NOT NULL, PRIMARY KEY (host_id, seq));
        CREATE INDEX job_refusal_job ON job_refusal (seq);
        CREATE TABLE ready (
          seq bigint PRIMARY KEY, class_id bigint NOT NULL, priority integer NOT NULL, since double precision NOT NULL,
          owner text NOT NULL DEFAULT ''
        ) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
        CREATE INDEX ready_order ON ready (class_id, priority DESC, seq);
        CREATE INDEX ready_owner ON ready (class_id, owner, priority DESC, seq);
        CREATE TABLE ripening (seq bigint PRIMARY KEY, not_before double precision NOT NULL);
        CREATE INDEX ripening_due ON ripening (not_before);
        CREATE TABLE lease (
          job_id text COLLATE "C" PRIMARY KEY, host_id text NOT NULL, epoch bigint NOT NULL,
          expires_at double precision NOT NULL, expired boolean NOT NULL, preempt text NOT NULL DEFAULT ''
        ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
        CREATE INDEX lease_due ON lease (expires_at) WHERE NOT expired;
        CREATE TABLE attempt (
          job_id text COLLATE "C" NOT NULL, epoch bigint NOT NULL, host_id text NOT NULL, claim_id text NOT NULL,
          claimed_at double precision NOT NULL, started_at double precision, ended_at double precision,
          outcome text NOT NULL, cause text NOT NULL, error text NOT NULL, artifact text NOT NULL,
          checkpoint text NOT NULL, facts bytea NOT NULL, number integer NOT NULL DEFAULT 0,
          trainer_digest text NOT NULL DEFAULT '', taken bytea NOT NULL DEFAULT '', PRIMARY KEY (job_id, epoch)
        ) WITH (fillfactor = 80);
        CREATE INDEX attempt_claim ON attempt (claim_id, host_id);
        CREATE INDEX attempt_host ON attempt (host_id, ended_at) WHERE ended_at IS NOT NULL;
        CREATE INDEX attempt_open ON attempt ((host_id || '')) WHERE ended_at IS NULL;
        CREATE INDEX attempt_ended ON attempt (ended_at) WHERE ended_at IS NOT NULL;
        CREATE TABLE server (
          job_id text PRIMARY KEY, epoch bigint NOT NULL, address text NOT NULL, models bytea NOT NULL,
          used_at double precision NOT NULL
        );
        CREATE TABLE host (
          id text PRIMARY KEY, name text NOT NULL, capability bytea NOT NULL, registered_at double precision NOT NULL,
          state text NOT NULL, state_reason text NOT NULL, agent_version text NOT NULL, pool text NOT NULL,
          labels bytea NOT NULL DEFAULT '{{}}'
        );
        CREATE TABLE host_beat (host_id text PRIMARY KEY, seen double precision NOT NULL)
          WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
        CREATE TABLE host_lost (host_id text PRIMARY KEY, since double precision NOT NULL);
        CREATE TABLE host_sample (
          step integer NOT NULL, host_id text NOT NULL, at double precision NOT NULL, body bytea NOT NULL,
          PRIMARY KEY (host_id, step, at)
        );
        CREATE INDEX host_sample_at ON host_sample (step, at);
        CREATE TABLE reservation (
          host_id text NOT NULL, seq bigint NOT NULL, amounts bytea NOT NULL, kind text NOT NULL,
          expires_at double precision NOT NULL, PRIMARY KEY (host_id, seq)
        );
        CREATE FUNCTION open_claims(hosts text[], claims text[])
        RETURNS TABLE (host text, claim text, job_id text, epoch bigint, taken bytea, expired boolean,
          reserved bigint, kind text, expires_at double precision)
        LANGUAGE plpgsql VOLATILE ROWS 64 AS $$
        BEGIN
          PERFORM pg_advisory_xact_lock(key) FROM (
            SELECT DISTINCT hashtextextended(w.h, 7) AS key FROM unnest(hosts) AS w (h) ORDER BY key
          ) AS ordered;
          RETURN QUERY SELECT w.h, w.c, '', 0::bigint, ''::bytea, false, 0::bigint, '', 0::float8
            FROM unnest(hosts, claims) WITH ORDINALITY AS w (h, c, n)
            WHERE (SELECT state FROM host WHERE id = w.h) = 'active'
              AND (SELECT count(*) FROM attempt a WHERE a.claim_id = w.c AND a.host_id = w.h) = 0
            ORDER BY w.n;
          RETURN QUERY SELECT w.h, NULL, a.job_id, a.epoch, a.taken, l.expired, 0::bigint, '', 0::float8
            FROM (SELECT DISTINCT h FROM unnest(hosts) AS w (h)) AS w
            CROSS JOIN LATERAL (
              SELECT o.job_id, o.epoch, o.taken FROM attempt o
              WHERE o.host_id || '' = w.h AND o.ended_at IS NULL OFFSET 0
            ) AS a
            CROSS JOIN LATERAL (
              SELECT e.expired FROM lease e WHERE e.job_id = a.job_id AND e.epoch = a.epoch OFFSET 0
            ) AS l;
          RETURN QUERY SELECT v.host_id, NULL, '', 0::bigint, v.amounts, false, v.seq,
              CASE WHEN EXISTS (SELECT FROM ready r WHERE r.seq = v.seq)
                AND NOT EXISTS (SELECT FROM job_refusal x WHERE x.host_id = v.host_id AND x.seq = v.seq)
              THEN v.kind ELSE 'missed' END, v.expires_at
            FROM reservation v WHERE v.host_id = ANY(hosts) AND v.kind <> 'missed' ORDER BY v.seq;
        END $$;
        CREATE TABLE job_count (project text NOT NULL, status text NOT NULL, n bigint NOT NULL);
        CREATE FUNCTION count_new_jobs() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          INSERT INTO job_count SELECT project, shown, count(*) FROM (
            SELECT project, CASE WHEN status NOT IN ('completed', 'failed', 'cancelled') THEN 'open'
              WHEN archived OR superseded THEN '' ELSE status END AS shown FROM added
          ) AS j WHERE shown <> '' GROUP BY project, shown;
          RETURN NULL;
        END $$;
        CREATE TRIGGER job_count_insert AFTER INSERT ON job REFERENCING NEW TABLE AS added
          FOR EACH STATEMENT EXECUTE FUNCTION count_new_jobs();
        CREATE FUNCTION count_ended_job() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          INSERT INTO job_count SELECT project, shown, n FROM (VALUES
            (OLD.project, CASE WHEN OLD.status NOT IN ('completed', 'failed', 'cancelled') THEN 'open'
              WHEN OLD.archived OR OLD.superseded THEN '' ELSE OLD.status END, -1),
            (NEW.project, CASE WHEN NEW.status NOT IN ('completed', 'failed', 'cancelled') THEN 'open'
              WHEN NEW.archived OR NEW.superseded THEN '' ELSE NEW.status END, 1)
          ) AS c (project, shown, n) WHERE shown <> '';
          RETURN NULL;
        END $$;
        CREATE TRIGGER job_count_update AFTER UPDATE OF status, archived, superseded ON job FOR EACH ROW
          WHEN (OLD.status IN ('completed', 'failed', 'cancelled')
            OR NEW.status IN ('completed', 'failed', 'cancelled'))
          EXECUTE FUNCTION count_ended_job();
        """,
        "ALTER TABLE host ADD COLUMN ephemeral boolean NOT NULL DEFAULT false",
    ),
)
