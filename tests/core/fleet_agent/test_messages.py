"""Small decisions: when a certificate is renewed, how a query is spelled, where a secret may go."""

from __future__ import annotations

import pytest

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.fleet.agent.identity import Membership
from strata.fleet.agent.selftest import check_clock_skew
from strata.fleet.client.hub_client import HubClient, encode_query
from strata.fleet.core.job import JobStatus
from strata.fleet.wire.jobs import JobsQuery
from strata.fleet.wire.streams import PieceQuery

DAY_S = 86_400.0
SCOPED = Secret("tml-0123456789ab-" + "0" * 40)


def test_a_certificate_is_renewed_at_half_its_life() -> None:
    member = Membership(url="https://hub", host_id="h", name="n", certified_at_s=1000.0, valid_for_s=DAY_S)
    assert not member.renewal_due(1000.0 + DAY_S / 2 - 1)
    assert member.renewal_due(1000.0 + DAY_S / 2)
    # A clock that was set back does not put the renewal off for ever.
    assert member.renewal_due(0.0)
    assert not Membership(url="http://127.0.0.1", host_id="h", name="n").renewal_due(1e12)


def test_a_query_has_what_differs_from_the_defaults() -> None:
    assert encode_query(None) == ""
    assert encode_query(PieceQuery(epoch=2, offset=0)) == "?epoch=2&offset=0"
    assert encode_query(PieceQuery(epoch=2, offset=5, last=True)) == "?epoch=2&offset=5&last=true"
    query = JobsQuery(status=(JobStatus.PENDING, JobStatus.RUNNING), model="a b")
    assert encode_query(query) == "?status=pending&status=running&model=a+b"


@pytest.mark.parametrize("url", ["http://192.0.2.1:8443", "http://hub.example.org"])
def test_a_secret_is_not_sent_in_the_clear(url: str) -> None:
    with pytest.raises(StrataError, match="in the clear"):
        HubClient(url, bearer=SCOPED)
    HubClient("http://127.0.0.1:1", bearer=SCOPED)
    HubClient("http://[::1]:1", bearer=SCOPED)


@pytest.mark.parametrize("text", ["0" * 48, f"hst-host_1-{'0' * 40}", f"tml-op_0123456789ab-{'0' * 40}", "tm"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:8443", "http://localhost:8443", "http://[::1]:8443"])
def test_only_a_scoped_key_is_sent_to_plain_loopback(url: str, text: str) -> None:
    with pytest.raises(StrataError, match="any user of this machine could listen there") as refused:
        HubClient(url, bearer=Secret(text))
    assert "unix:" in (refused.value.hint or "")
    HubClient("unix:/run/hub.sock", bearer=Secret(text))
    HubClient("https://127.0.0.1:8443", bearer=Secret(text))


@pytest.mark.parametrize("url", ["hub:8443", "ftp://hub", "https://", "https://user:pass@hub", "https://hub:99999"])
def test_what_is_no_address_of_a_hub_is_refused_without_repeating_a_password(url: str) -> None:
    with pytest.raises(StrataError, match="not the address of a hub") as refused:
        HubClient(url)
    assert refused.value.code is Code.INVALID
    assert "pass" not in refused.value.message


def test_a_clock_that_is_far_off_is_said_with_its_direction() -> None:
    assert check_clock_skew(10.0).ok
    behind = check_clock_skew(-4000.0)
    assert not behind.ok
    assert "4000 s behind" in behind.reason
