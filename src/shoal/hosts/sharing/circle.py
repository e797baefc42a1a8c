"""The pickers that share with this one: where they are listened for, and when each is looked at.

Owns the set of addresses, those of siblings and those that names of other pools stand for.  Each address is an `Ear`.
"""

import asyncio
from collections.abc import Iterable
from time import monotonic

from shoal.hosts import logs
from shoal.hosts.driver import Driver
from shoal.hosts.fleet.resolver import system_lookup
from shoal.hosts.sharing.ear import Ear
from shoal.hosts.sharing.lesson import LESSON_S, learn
from shoal.hosts.sharing.picture import PeerPicture
from shoal.hosts.sharing.secret import Secret
from shoal.hosts.sharing.voice import Voice
from shoal.hosts.sharing.wires import Wires
from shoal.routing.settings import Sharing as SharingSettings

TICK_S = 0.25
LOOKUP_S = 5.0
LISTEN_S = 0.0005
"""How often, at most, a request's arrival makes this picker listen before it decides: requests of one moment come in
one turn of the loop, in which it would hear nothing."""

HEAR_S = 1.0
"""How long a picker that begins listens for anybody who could teach it."""

MAX_EARS = 512
_LATE_S = 1.0

Pair = tuple[str, str]
"""Where a picker is heard, and where it is asked."""

_log = logs.get("sharing")


class Circle:
    """Sharing at work, from `start` to `close`."""

    def __init__(self, driver: Driver, run: str, name: str, settings: SharingSettings, secret: Secret | None) -> None:
        self._driver = driver
        self._run = run
        self._settings = settings
        self._wires = Wires(secret)
        self.voice = Voice(self._wires, driver, run, name)
        self._listened_at = 0.0
        self._ears: dict[str, Ear] = {}
        self._deaf: dict[str, str] = {}  # address -> why it cannot be listened to, as the log has it
        self._siblings: tuple[Pair, ...] = ()
        self._remote: tuple[Pair, ...] = ()
        self._bound = ""
        self._tasks: list[asyncio.Task[None]] = []
        self.skipped = self.gaps = self.heard = self.syncs = 0

    def start(self) -> None:
        """Listen where the configuration says, and begin to speak."""
        self._driver.before = self._hear
        if self._settings.listen:
            self._listen(self._settings.listen)
        self._tasks.append(asyncio.create_task(self._ticks(), name="sharing"))
        if self._settings.peers:
            self._tasks.append(asyncio.create_task(self._lookups(), name="sharing-dns"))

    def listen_here(self, pair: Pair) -> None:
        """Be heard by siblings at a pair of unix sockets.  Raises OSError."""
        if pair[0] != self._bound:
            self.voice.listen(*pair)
            self._bound = pair[0]

    def follow(self, siblings: Iterable[Pair]) -> None:
        """Listen for exactly these siblings, besides other pools' pickers."""
        self._siblings = tuple(siblings)
        self._settle()

    async def begin(self, teachers: Iterable[str], timeout_s: float = LESSON_S) -> None:
        """Catch up with those at work before this picker is ready: their bookings, and the index of one of them.

        teachers: addresses of siblings that are at work.  Bounded by `timeout_s`.
        """
        wanted = set(teachers)
        loop = asyncio.get_running_loop()
        until, hear_until = loop.time() + timeout_s, loop.time() + min(HEAR_S, timeout_s)
        if not wanted and not self._settings.peers:
            return
        while loop.time() < until:
            known = [ear for ear in self._ears.values() if ear.state != "silent"]
            late = [ear for ear in self._ears.values() if ear.address in wanted and not ear.is_heard]
            if loop.time() >= hear_until:
                late = [ear for ear in late if ear.state != "silent"]
                if not known:
                    break
            if not late and any(ear.is_heard for ear in known):
                break
            await asyncio.sleep(0.01)
        teacher = next((ear for _, ear in sorted(self._ears.items()) if ear.is_heard), None)
        if teacher is None:
            _log.info("no peer to learn from")
            return
        began = loop.time()
        parts = await learn(teacher, max(0.1, until - loop.time()))
        _log.info("learnt from a peer", peer=teacher.name, parts=parts, took_s=round(loop.time() - began, 3))

    def pictures(self) -> list[PeerPicture]:
        """Every address at which somebody was heard, and silent ones of siblings."""
        siblings = {said for said, _ in self._siblings}
        pictures = [ear.picture() for _, ear in sorted(self._ears.items())]
        return [
            each for each in pictures if each.state != "itself" and (each.state != "silent" or each.address in siblings)
        ]

    def totals(self) -> dict[str, int]:
        """Counts over all addresses, those that are gone included."""
        ears = self._ears.values()
        return {
            "heard": self.heard + sum(ear.messages for ear in ears),
            "gaps": self.gaps + sum(ear.gaps for ear in ears),
            "skipped": self.skipped + sum(ear.skipped for ear in ears),
            "syncs": self.syncs + sum(ear.syncs for ear in ears),
            "said": self.voice.messages,
        }

    def close(self, *, is_leaving: bool) -> None:
        """End it.  is_leaving: the process ends, and peers are told."""
        for task in self._tasks:
            task.cancel()
        self._driver.before = None
        self.voice.close(is_leaving=is_leaving)
        for address in list(self._ears):
            self._drop(address)
        self._wires.close()

    # ------------------------------------------------------------------ inside

    def _hear(self) -> None:
        """Take in what peers have said already, before a decision; who was silent wakes the loop when it speaks."""
        if monotonic() - self._listened_at >= LISTEN_S:
            for ear in self._ears.values():
                if ear.is_heard:
                    ear.hear()
            self._listened_at = monotonic()

    def _listen(self, place: str) -> None:
        """Take the first free pair of the ports; without one this picker hears, and is not heard."""
        host, _, port = place.rpartition(":")
        for at in range(int(port), int(port) + self._settings.ports, 2):
            try:
                self.voice.listen(f"tcp://{host}:{at}", f"tcp://{host}:{at + 1}")
            except OSError:
                continue
            _log.info("open to other pools' pickers", at=f"{host}:{at}", answers_at=f"{host}:{at + 1}")
            return
        _log.error("every port for sharing is taken, so other pools do not hear this picker", listen=place)

    async def _ticks(self) -> None:
        last = monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = monotonic()
            # Where this process itself was late, what was said waits unread.
            ears = self._ears.values() if now - last < _LATE_S else ()
            everybody: list[Voice | Ear] = [self.voice, *ears]
            for each in everybody:
                try:
                    each.tick()
                except Exception:
                    # Nor may it stop the clock of the others.
                    _log.exception("a peer could not be looked after")
            last = now

    async def _lookups(self) -> None:
        found: dict[str, list[list[Pair]]] = {}
        while True:
            for place in self._settings.peers:
                host, _, port = place.rpartition(":")
                try:
                    found[place] = [
                        _pairs(each, int(port), self._settings.ports) for each in await system_lookup(host.strip("[]"))
                    ]
                except (OSError, UnicodeError) as error:  # what was found last stays
                    _log.debug("a peer's name has no address", name=host, why=error)
            self._remote = tuple(pair for each in found.values() for pairs in each for pair in pairs)
            self._settle()
            await asyncio.sleep(LOOKUP_S)

    def _settle(self) -> None:
        """Listen at every address that is wanted, and at no other."""
        wanted = dict([*self._siblings, *self._remote][:MAX_EARS])
        for address in [each for each in self._ears if each not in wanted]:
            self._drop(address)
        self._deaf = {address: why for address, why in self._deaf.items() if address in wanted}
        for said, asked in wanted.items():
            if said in self._ears:
                continue
            try:
                self._ears[said] = Ear(self._wires, said, asked, self._driver.feed, self._is_taken)
                self._deaf.pop(said, None)
            except OSError as error:
                if self._deaf.get(said) != str(error):
                    self._deaf[said] = str(error)
                    _log.error("a peer cannot be listened to", at=said, why=error)

    def _drop(self, address: str) -> None:
        ear = self._ears.pop(address)
        self.heard, self.gaps = self.heard + ear.messages, self.gaps + ear.gaps
        self.skipped, self.syncs = self.skipped + ear.skipped, self.syncs + ear.syncs
        ear.close()

    def _is_taken(self, run: str, asking: Ear) -> bool:
        if run == self._run:
            return True
        heard = ("catching-up", "heard")
        return any(ear.run == run and ear is not asking and ear.state in heard for ear in self._ears.values())


def _pairs(address: str, port: int, ports: int) -> list[Pair]:
    """Return where the pickers at one address may be."""
    shown = f"[{address}]" if ":" in address else address
    return [(f"tcp://{shown}:{at}", f"tcp://{shown}:{at + 1}") for at in range(port, port + ports, 2)]
