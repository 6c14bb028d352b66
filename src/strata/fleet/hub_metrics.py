"""The Prometheus metrics of the hub, `strata_hub_…`: names, help texts, labels and buckets."""

from __future__ import annotations

from typing import Final

from prometheus_client import generate_latest

from strata.fleet.core.attention import HubBackups
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.records import FleetCounts
from strata.http.metrics import MetricFactory, process_registry
from strata.http.request_metrics import RequestMetrics

PREFIX: Final = "strata_hub_"
HOST_STATES: Final = ("online", "offline", "draining", "paused", "quarantined")
"""States of hosts that have not left; online and offline are those that take jobs."""


class HubMetrics:
    def __init__(self) -> None:
        self._registry = registry = process_registry(PREFIX)
        make = MetricFactory(PREFIX, registry)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self.requests = RequestMetrics(PREFIX, registry)
        self.auth_failures = counter("auth_failures_total", "Requests with credentials that are not good")
        self.claims = counter("claims_total", "Claims that hosts have sent, by outcome", "outcome")
        self.claims_waiting = gauge("claims_waiting", "Claims that wait here for a job")
        self.leases_granted = counter("leases_granted_total", "Leases that this hub gave to hosts")
        self.leases_renewed = counter("lease_renewals_total", "Leases that heartbeats asked to renew")
        self.leases_lost = counter("lease_losses_total", "Renewals that were refused: the attempt is over")
        self.leases_expired = counter("leases_expired_total", "Leases that this hub let expire")
        self.heartbeats = counter("heartbeats_total", "Heartbeats of hosts")
        self.samples = counter("host_samples_total", "Samples of processors, memory and GPUs that hosts sent")
        self.attempts = counter("attempts_total", "Ends of attempts that hosts reported, by outcome", "outcome")
        self.event_lag = histogram("event_lag_seconds", "From the time of an event until its listeners get it here")
        self.listeners = gauge("event_listeners", "Streams of events that are open")
        self.database = histogram("database_seconds", "Time that a read or a transaction took, with its wait")
        self.writable = gauge("database_writable", "1 if the last probe could write to the database, else 0")
        self.disk_free = gauge("disk_free_bytes", "Free space of the disk with the data folder")
        self.backup_at = gauge(
            "backup_timestamp_seconds", "Unix time of the newest complete scheduled backup; 0: there is none"
        )
        self.backup_max_age = gauge(
            "backup_max_age_seconds", "Age that the newest scheduled backup may have; 0: none are scheduled"
        )
        self.jobs = gauge("jobs", "Jobs, by status", "status")
        self.ready = gauge("jobs_ready", "Pending jobs that a host may claim now")
        self.hosts = gauge("hosts", "Hosts that have not left, by state", "state")
        self.reservations = gauge("reservations", "Reservations of hosts for jobs that need more room")
        self.gpus = gauge("gpus", "GPUs in the samples of hosts that are online")
        self.gpu_use = gauge("gpu_use_ratio", "Mean share of the time in which these GPUs computed")
        for outcome in ("granted", "empty"):
            self.claims.labels(outcome)
        for outcome in ("completed", *Cause):
            self.attempts.labels(str(outcome))
        self.set_counts(FleetCounts())
        self.read_at_s = float("-inf")
        """When the counts were read last; of the monotonic clock."""

    def record_claim(self, leases: int) -> None:
        self.claims.labels("granted" if leases else "empty").inc()
        self.leases_granted.inc(leases)

    def set_counts(self, counts: FleetCounts) -> None:
        for status in JobStatus:
            self.jobs.labels(status.value).set(counts.jobs.get(status, 0))
        for state in HOST_STATES:
            self.hosts.labels(state).set(counts.hosts.get(state, 0))
        self.ready.set(counts.ready)
        self.reservations.set(counts.reservations)
        self.gpus.set(counts.gpus)
        self.gpu_use.set(counts.gpu_use)

    def set_backups(self, backups: HubBackups | None) -> None:
        self.backup_at.set(0.0 if backups is None or backups.newest_at_s is None else backups.newest_at_s)
        self.backup_max_age.set(0.0 if backups is None else backups.max_age_s)

    def render(self) -> bytes:
        return generate_latest(self._registry)
