"""Pickers that decide over the same endpoints and share what they know, in virtual time.

Owns when a router is told something, by the pool or by its peers, and when it hears that time has passed.  What its
commands mean is the cluster's.
"""

import math
from collections.abc import Callable, Sequence

from shoal.routing import Command, Router, Ticked, events
from shoal.simulation.loop import Loop, Rank

OnStep = Callable[[int, float, events.Event, list[Command]], None]


class Pickers:
    """Routers over one set of endpoints.

    carry_out: called with these pickers, the place of a router among them, and each command of it.  first: the number
    of the first of them among all of a cluster, as `on_step` is told it.  on_step: told of each step of a router.
    is_exact: whether they hear the KV events of engines.
    """

    __slots__ = ("_carry_out", "_deadlines", "_first", "_gossip_s", "_loop", "_on_step", "is_exact", "routers")

    def __init__(
        self,
        routers: Sequence[Router],
        loop: Loop,
        carry_out: "Callable[[Pickers, int, Command], None]",
        *,
        gossip_s: float,
        is_exact: bool = False,
        on_step: OnStep | None = None,
        first: int = 0,
    ) -> None:
        self.routers = list(routers)
        self._loop = loop
        self._carry_out = carry_out
        self._gossip_s = gossip_s
        self._on_step = on_step
        self._first = first
        self.is_exact = is_exact
        self._deadlines = [math.inf] * len(self.routers)

    def introduce(self) -> None:
        """Have the routers know each other."""
        if len(self.routers) < 2:
            return
        for number, router in enumerate(self.routers):
            router.outbox.open()
            for other in range(len(self.routers)):
                if other != number:
                    self.feed(number, events.PeerJoined(str(other)))

    def feed(self, number: int, event: events.Event) -> None:
        """Give a router an event, carry out what it wants, and see what follows."""
        self.tell(number, event)
        self.follow(number)

    def feed_all(self, event: events.Event) -> None:
        """Give all of them an event."""
        for number in range(len(self.routers)):
            self.feed(number, event)

    def tell_all(self, event: events.Event) -> None:
        """Give all of them one event of several; `follow_all` comes behind the last one."""
        for number in range(len(self.routers)):
            self.tell(number, event)

    def follow_all(self) -> None:
        """See what follows for each of them."""
        for number in range(len(self.routers)):
            self.follow(number)

    def tell(self, number: int, event: events.Event) -> None:
        """Give a router an event and carry out what it wants."""
        ordered = self.routers[number].handle(event, self._loop.now)
        if self._on_step is not None:
            self._on_step(self._first + number, self._loop.now, event, ordered)
        for command in ordered:
            self._carry_out(self, number, command)

    def follow(self, number: int) -> None:
        """Have its peers hear the news of a router, and have it told when its deadline has come."""
        router = self.routers[number]
        if len(self.routers) > 1 and (news := tuple(router.outbox.take())):
            told = events.PeerTold(str(number), news)
            for other in range(len(self.routers)):
                if other != number:
                    self._loop.after(self._gossip_s, Rank.NEWS, self.feed, other, told)
        deadline = router.deadline()
        if deadline is not None and deadline < self._deadlines[number]:
            self._deadlines[number] = deadline
            self._loop.at(max(deadline, self._loop.now), Rank.NEWS, self._tick, number, deadline)

    def _tick(self, number: int, deadline: float) -> None:
        if self._deadlines[number] == deadline:
            self._deadlines[number] = math.inf
            self.feed(number, Ticked())
