"""Sharing as a worker process has it: nothing until there is another picker, then a `Circle`.

Owns when sharing begins and ends, and what is shown of it.  ZMQ is loaded with the first peer.
"""

import contextlib
from typing import TYPE_CHECKING

import msgspec

from shoal.hosts import logs
from shoal.hosts.driver import Driver
from shoal.hosts.sharing.picture import PeerPicture
from shoal.hosts.sharing.secret import Secret
from shoal.measures import Counter, Family, Gauge
from shoal.routing.settings import Sharing as SharingSettings

if TYPE_CHECKING:
    from shoal.hosts.sharing.circle import Circle

_log = logs.get("sharing")


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workers of one pool are heard and asked, as their supervisor says it: pairs of ZMQ addresses."""

    own: tuple[str, str]
    siblings: tuple[tuple[str, str], ...] = ()


class Sharing:
    """What one picker shares with others.

    run: name of this process, never used again.  name: for people.  secret: None without other pools.
    """

    def __init__(self, driver: Driver, run: str, name: str, settings: SharingSettings, secret: Secret | None) -> None:
        self._driver = driver
        self._run = run
        self._name = name
        self._settings = settings
        self._secret = secret
        self._circle: Circle | None = None

    async def start(self) -> None:
        """Begin to share with the pickers of other pools that the configuration names."""
        if self._settings.listen or self._settings.peers:
            self._open()

    def follow(self, places: Places) -> None:
        """Share with exactly these siblings from now on."""
        if not places.siblings and self._circle is None:
            return
        try:
            circle = self._open()
            circle.listen_here(places.own)
            circle.follow(places.siblings)
        except OSError as error:
            _log.error("this picker cannot share with its siblings", why=error)
        if not (places.siblings or self._settings.listen or self._settings.peers):
            self._shut(is_leaving=False)

    async def begin(self, teachers: tuple[str, ...]) -> None:
        """Take over what is known to those at work, within a few seconds; see `Circle.begin`."""
        if self._circle is not None:
            await self._circle.begin(teachers)

    def pictures(self) -> list[PeerPicture]:
        """The peers, none while nothing is shared."""
        return self._circle.pictures() if self._circle is not None else []

    def families(self) -> list[Family]:
        """What is counted, nothing while nothing is shared."""
        if self._circle is None:
            return []
        peers = Gauge("shoal_sharing_peers", "Other pickers that are heard.", merge="max")
        bookings = Gauge("shoal_sharing_bookings", "Requests in flight of other pickers.", merge="max")
        gauges = self._driver.router.status().peers
        peers.set(gauges.peers)
        bookings.set(gauges.bookings)
        totals = self._circle.totals()
        counters = []
        for name, help_text in _COUNTED.items():
            counter = Counter(f"shoal_sharing_{name}", help_text)
            counter.stand_at(totals[name])
            counters.append(counter.family())
        return [peers.family(), bookings.family(), *counters]

    def close(self) -> None:
        """End it; peers are told."""
        self._shut(is_leaving=True)

    def _open(self) -> "Circle":
        if self._circle is None:
            from shoal.hosts.sharing.circle import Circle

            self._circle = Circle(self._driver, self._run, self._name, self._settings, self._secret)
            self._circle.start()
        return self._circle

    def _shut(self, *, is_leaving: bool) -> None:
        circle, self._circle = self._circle, None
        if circle is not None:
            with contextlib.suppress(OSError):
                circle.close(is_leaving=is_leaving)


_COUNTED = {
    "said": "Messages that this pool's pickers published.",
    "heard": "Messages of peers that were taken in.",
    "gaps": "Messages of peers that did not come.",
    "skipped": "Messages of peers of another version, or unreadable.",
    "syncs": "How often a peer was asked for all that it has in flight.",
}
