"""Several routers over the same endpoints that tell each other what they do, with a delay and in any pace."""

import itertools
from collections import deque

from shoal.routing.events import PeerJoined, PeerSynced, PeerTold
from shoal.routing.news import News
from tests.routing.script import Pool, Sent


class Gossip:
    """Pools `a`, `b`, ...; what one does reaches the others when `deliver` says so."""

    def __init__(self, routers: int = 2, endpoints: int = 4, **fields: object) -> None:
        self.pools = [Pool(endpoints, **fields) for _ in range(routers)]  # type: ignore[arg-type]
        self._wires: dict[tuple[int, int], deque[tuple[News, ...]]] = {}
        for sender, receiver in itertools.permutations(range(routers), 2):
            self._wires[sender, receiver] = deque()
            self.pools[receiver].feed(PeerJoined(str(sender)))
        for number, pool in enumerate(self.pools):
            pool.router.outbox.open()
            pool._count = 1000 * number

    def send(self, number: int, prompt: str = "p", tokens: int = 640) -> Sent:
        return self.pools[number].send(prompt, tokens)

    def gather(self) -> None:
        """Put what every router has to tell on its wires."""
        for sender, pool in enumerate(self.pools):
            news = tuple(pool.router.outbox.take())
            for (origin, _), wire in self._wires.items():
                if origin == sender and news:
                    wire.append(news)

    def deliver(self, most: int = 1_000_000) -> None:
        """Bring up to `most` messages of each wire to their end."""
        self.gather()
        for (sender, receiver), wire in self._wires.items():
            for _ in range(min(most, len(wire))):
                self.pools[receiver].feed(PeerTold(str(sender), wire.popleft()))

    def sync(self, sender: int, receiver: int) -> None:
        """Tell all that `sender` has in flight, in place of what is on the wire."""
        self.gather()
        self._wires[sender, receiver].clear()
        after = 0
        while True:
            giver = self.pools[sender]
            bookings, until = giver.router.outbox.bookings(after, giver.now)
            self.pools[receiver].feed(PeerSynced(str(sender), tuple(bookings), after, until))
            if until is None:
                return
            after = until


def columns(pool: Pool) -> dict[str, list[float]]:
    """The columns in which work in flight counts."""
    names = (
        "inflight_requests",
        "inflight_output_tokens",
        "booked_uncached_tokens",
        "clear_at",
        "peer_requests",
        "peer_uncached_tokens",
    )
    return {name: pool.router._fleet.columns[name].tolist() for name in names}


def is_idle(pool: Pool) -> bool:
    """Whether every column of work in flight is exactly zero."""
    return all(value == 0.0 for column in columns(pool).values() for value in column)
