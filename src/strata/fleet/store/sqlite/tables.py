"""The schema of the fleet in SQLite: tables, indexes and numbered migrations."""

from __future__ import annotations

from typing import Final

from strata.database.migrations import Component

MAY_SERVE: Final = """instr(spec, CAST('"kind":"server"' AS BLOB)) > 0"""
"""A spec with the text of that kind in it; also one that has it among its hyper-parameters."""
SEARCHED_TEXT: Final = (
    "lower(label || char(10) || owner || char(10) || project || char(10) || model || char(10) || sweep)"
)
"""What people search jobs by, as one text: `LIKE` on each column took three times as long."""
COMPONENT: Final = Component(
    "fleet",
    20,
    (
        # A job's `attempts` and an attempt's `number` (1, 2, 3 …) are for people; the epoch is the fence, and a restore
        # leaves gaps in it. `taken` is what an attempt takes of its host.
        # `job_server` and `job_held`: lists of jobs that may be servers, and of jobs that hosts hold, look at no other
        # job. `job_sweep`: the jobs of a sweep and how many there are of each status, from the index alone.
        # `job_refusal`: hosts that could not set a job up; claims pass over it for them.
        # `ready_owner`: for fair shares, a claim looks at the first jobs of each owner.
        # `server`: where servers serve. It counts while the attempt with this epoch holds the lease.
        # `host_sample`: what hosts do, as sampled (step 0) and as means over a step.
        # `host_lost`: hosts that were silent for longer than a lease, until their next heartbeat.
        # `reservation`: what hosts keep free for jobs that wait; `job.gang` says which of these belong together, and
        # `lease.preempt` which attempts have to yield.
        # `job_count`: jobs that lists show, by project, and by the status in which they ended or `open`. It does not
        # change with a claim.
        f"""
        CREATE TABLE req_class (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, spec BLOB NOT NULL) STRICT;
        CREATE TABLE trainer (digest TEXT PRIMARY KEY, spec BLOB NOT NULL) WITHOUT ROWID, STRICT;
        CREATE TABLE trainer_name (
          project TEXT NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL REFERENCES trainer,
          PRIMARY KEY (project, name)
        ) WITHOUT ROWID, STRICT;
        CREATE TABLE policy (
          host TEXT PRIMARY KEY, spec BLOB NOT NULL, project TEXT NOT NULL DEFAULT 'default'
        ) WITHOUT ROWID, STRICT;
        CREATE TABLE project (name TEXT PRIMARY KEY, owner TEXT NOT NULL, made_at REAL NOT NULL) WITHOUT ROWID, STRICT;
        CREATE TABLE quota (owner TEXT PRIMARY KEY, spec BLOB NOT NULL) WITHOUT ROWID, STRICT;
        CREATE TABLE job (
          seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, spec BLOB NOT NULL,
          class_id INTEGER NOT NULL REFERENCES req_class, status TEXT NOT NULL, epoch INTEGER NOT NULL,
          created_at REAL NOT NULL, changed_at REAL NOT NULL, not_before REAL NOT NULL, host_id TEXT NOT NULL,
          reason TEXT NOT NULL, artifact TEXT NOT NULL, declared INTEGER NOT NULL, orphaned INTEGER NOT NULL,
          waits_for INTEGER NOT NULL, model TEXT NOT NULL, sweep TEXT NOT NULL, priority INTEGER NOT NULL,
          trainer TEXT NOT NULL, charged INTEGER NOT NULL, lost INTEGER NOT NULL, excused INTEGER NOT NULL,
          checkpoint TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, project TEXT NOT NULL DEFAULT 'default',
          trainer_digest TEXT NOT NULL DEFAULT '', submitted_by TEXT NOT NULL DEFAULT '',
          infra INTEGER NOT NULL DEFAULT 0, owner TEXT NOT NULL DEFAULT '', label TEXT NOT NULL DEFAULT '',
          archived INTEGER NOT NULL DEFAULT 0, superseded INTEGER NOT NULL DEFAULT 0, gang TEXT NOT NULL DEFAULT ''
        ) STRICT;
        CREATE INDEX job_status ON job (status, id);
        CREATE INDEX job_host ON job (host_id, id);
        CREATE INDEX job_label ON job (label, project, seq);
        CREATE INDEX job_owner ON job (owner) WHERE status IN ('pending', 'claimed', 'running');
        CREATE INDEX job_gang ON job (gang) WHERE gang <> '';
        CREATE INDEX job_gang_open ON job (gang) WHERE gang <> '' AND status IN ('pending', 'claimed', 'running');
        CREATE INDEX job_sweep ON job (project, sweep, status, changed_at, archived, superseded) WHERE sweep <> '';
        CREATE INDEX job_ended ON job (changed_at, seq) WHERE status IN ('completed', 'failed', 'cancelled');
        CREATE INDEX job_failed ON job (changed_at, seq) WHERE status = 'failed';
        CREATE INDEX job_server ON job (id) WHERE {MAY_SERVE};
        CREATE INDEX job_held ON job (seq, project, status) WHERE status IN ('claimed', 'running');
        CREATE INDEX job_search ON job ({SEARCHED_TEXT});
        CREATE TABLE job_after (
          job_id TEXT NOT NULL, needs TEXT NOT NULL, PRIMARY KEY (job_id, needs)
        ) WITHOUT ROWID, STRICT;
        CREATE INDEX job_after_needs ON job_after (needs, job_id);
        CREATE TABLE job_refusal (
          host_id TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (host_id, seq)
        ) WITHOUT ROWID, STRICT;
        CREATE INDEX job_refusal_job ON job_refusal (seq);
        CREATE TABLE ready (
          seq INTEGER PRIMARY KEY, class_id INTEGER NOT NULL, priority INTEGER NOT NULL, since REAL NOT NULL,
          owner TEXT NOT NULL DEFAULT ''
        ) STRICT;
        CREATE INDEX ready_order ON ready (class_id, priority DESC, seq);
        CREATE INDEX ready_owner ON ready (class_id, owner, priority DESC, seq);
        CREATE TABLE ripening (seq INTEGER PRIMARY KEY, not_before REAL NOT NULL) STRICT;
        CREATE INDEX ripening_due ON ripening (not_before);
        CREATE TABLE lease (
          job_id TEXT PRIMARY KEY, host_id TEXT NOT NULL, epoch INTEGER NOT NULL, expires_at REAL NOT NULL,
          expired INTEGER NOT NULL, preempt TEXT NOT NULL DEFAULT ''
        ) WITHOUT ROWID, STRICT;
        CREATE INDEX lease_due ON lease (expired, expires_at);
        CREATE TABLE attempt (
          job_id TEXT NOT NULL, epoch INTEGER NOT NULL, host_id TEXT NOT NULL, claim_id TEXT NOT NULL,
          claimed_at REAL NOT NULL, started_at REAL, ended_at REAL, outcome TEXT NOT NULL, cause TEXT NOT NULL,
          error TEXT NOT NULL, artifact TEXT NOT NULL, checkpoint TEXT NOT NULL, facts BLOB NOT NULL,
          number INTEGER NOT NULL DEFAULT 0, trainer_digest TEXT NOT NULL DEFAULT '', taken BLOB NOT NULL DEFAULT x'',
          PRIMARY KEY (job_id, epoch)
        ) WITHOUT ROWID, STRICT;
        CREATE INDEX attempt_claim ON attempt (host_id, claim_id);
        CREATE INDEX attempt_host ON attempt (host_id, ended_at) WHERE ended_at IS NOT NULL;
        CREATE INDEX attempt_open ON attempt (host_id) WHERE ended_at IS NULL;
        CREATE INDEX attempt_ended ON attempt (ended_at) WHERE ended_at IS NOT NULL;
        CREATE TABLE server (
          job_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, address TEXT NOT NULL, models BLOB NOT NULL,
          used_at REAL NOT NULL
        ) WITHOUT ROWID, STRICT;
        CREATE TABLE host (
          id TEXT PRIMARY KEY, name TEXT NOT NULL, capability BLOB NOT NULL, registered_at REAL NOT NULL,
          state TEXT NOT NULL, state_reason TEXT NOT NULL, agent_version TEXT NOT NULL, pool TEXT NOT NULL,
          labels BLOB NOT NULL DEFAULT x'7b7d'
        ) WITHOUT ROWID, STRICT;
        CREATE TABLE host_beat (host_id TEXT PRIMARY KEY, seen REAL NOT NULL) WITHOUT ROWID, STRICT;
        CREATE TABLE host_lost (host_id TEXT PRIMARY KEY, since REAL NOT NULL) WITHOUT ROWID, STRICT;
        CREATE TABLE host_sample (
          step INTEGER NOT NULL, host_id TEXT NOT NULL, at REAL NOT NULL, body BLOB NOT NULL,
          PRIMARY KEY (host_id, step, at)
        ) WITHOUT ROWID, STRICT;
        CREATE INDEX host_sample_at ON host_sample (step, at);
        CREATE TABLE reservation (
          host_id TEXT NOT NULL, seq INTEGER NOT NULL, amounts BLOB NOT NULL, kind TEXT NOT NULL,
          expires_at REAL NOT NULL, PRIMARY KEY (host_id, seq)
        ) WITHOUT ROWID, STRICT;
        CREATE TABLE job_count (
          project TEXT NOT NULL, status TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (project, status)
        ) WITHOUT ROWID, STRICT;
        CREATE TRIGGER job_count_insert AFTER INSERT ON job
        WHEN NEW.status NOT IN ('completed', 'failed', 'cancelled') OR NOT (NEW.archived OR NEW.superseded)
        BEGIN
          INSERT INTO job_count VALUES (NEW.project,
            CASE WHEN NEW.status IN ('completed', 'failed', 'cancelled') THEN NEW.status ELSE 'open' END, 1)
            ON CONFLICT (project, status) DO UPDATE SET n = n + 1;
        END;
        CREATE TRIGGER job_count_update AFTER UPDATE OF status, archived, superseded ON job
        WHEN OLD.status IN ('completed', 'failed', 'cancelled') OR NEW.status IN ('completed', 'failed', 'cancelled')
        BEGIN
          UPDATE job_count SET n = n - 1 WHERE project = OLD.project AND status = CASE
            WHEN OLD.status NOT IN ('completed', 'failed', 'cancelled') THEN 'open'
            WHEN OLD.archived OR OLD.superseded THEN '' ELSE OLD.status END;
          INSERT INTO job_count SELECT NEW.project, shown, 1 FROM (SELECT CASE
            WHEN NEW.status NOT IN ('completed', 'failed', 'cancelled') THEN 'open'
            WHEN NEW.archived OR NEW.superseded THEN '' ELSE NEW.status END AS shown) WHERE shown <> ''
            ON CONFLICT (project, status) DO UPDATE SET n = n + 1;
        END;
        """,
        "ALTER TABLE host ADD COLUMN ephemeral INTEGER NOT NULL DEFAULT false",
    ),
)
