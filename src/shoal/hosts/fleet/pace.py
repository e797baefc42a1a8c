"""How often the fleet is looked at, and the bounds on what one look may cost.

Figures only, with the jitter that keeps a thousand endpoints from being asked in the same millisecond.
"""

import msgspec

from shoal.kernel import Chance


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and bounds of the fleet keeper; all times in seconds."""

    loading_s: float = 0.25
    """Between readiness checks of an endpoint that is loading: a new engine serves a quarter second after it can."""
    ready_s: float = 2.0
    """Between health checks of a ready endpoint; failed requests tell the router sooner anyway."""
    models_s: float = 10.0
    """Between readings of `/v1/models`: adapters come and go while an engine runs."""
    busy_scrape_s: float = 0.2
    """Between scrapes of an endpoint with work; the load of the last milliseconds is in the router's own books."""
    idle_scrape_s: float = 2.0
    """Longest wait between scrapes of an idle endpoint."""
    failed_scrape_s: float = 10.0
    """Longest wait after scrapes that failed, as for an engine without a metrics page."""
    dns_s: float = 10.0
    """Between look-ups of a DNS name."""
    report_s: float = 5.0
    """First wait between log lines about an endpoint that is not ready; doubles up to a minute."""
    timeout_s: float = 5.0
    """Limit of one health or models call; a busy engine answers late and is not dead."""
    scrape_timeout_s: float = 2.0
    """Limit of one scrape."""
    failure_limit: int = 3
    """Failed health checks in a row after which a ready endpoint counts as loading again."""
    drain_timeout_s: float = 3600.0
    """After this a draining endpoint is removed though it still has work."""
    linger_s: float = 0.1
    """Events that come within this time go to the sink together."""
    probes_per_s: float = 250.0
    """Readiness and health checks of the whole fleet: with more endpoints, each is asked less often."""
    scrapes_per_s: float = 250.0
    """Scrapes of the whole fleet: with more endpoints busy, each is asked less often, and one core bears it."""
    slots: int = 64
    """Calls under way at once to endpoints that answer; as many again to those that do not."""


class Tempo:
    """A Pace with jitter of one seeded stream, and the size of the fleet."""

    __slots__ = ("_stream", "members", "pace")

    def __init__(self, pace: Pace, seed: int) -> None:
        self.pace = pace
        self.members = 0
        self._stream = Chance(seed).stream("fleet.jitter")

    def spread(self, seconds: float) -> float:
        """`seconds`, give or take 10 %."""
        return seconds * (0.9 + 0.2 * float(self._stream.random()))

    def probe_wait_s(self, wanted_s: float) -> float:
        """The wait before the next readiness check, not under the fleet's share."""
        return self.spread(max(wanted_s, self.members / self.pace.probes_per_s))

    def scrape_wait_s(self, wanted_s: float) -> float:
        """The wait before the next scrape, not under the fleet's share."""
        return self.spread(max(wanted_s, self.members / self.pace.scrapes_per_s))
