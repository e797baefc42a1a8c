"""DNS names of engines: looked up again and again, each address an endpoint of its own.

A failed look-up keeps the last answer.  A name with IPv4 and IPv6 addresses counts by its IPv4 ones: a
dual-stack engine would otherwise be two endpoints and get twice its share.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable

from shoal.hosts.fleet.pace import Tempo
from shoal.hosts.logs import Log

log = Log("fleet")

Lookup = Callable[[str], Awaitable[list[str]]]


class Resolver:
    """Keeps the addresses of the wanted names.  changed: called after an answer differs from the last."""

    __slots__ = ("_answers", "_changed", "_lookup", "_reasons", "_slots", "_tasks", "_tempo")

    def __init__(self, changed: Callable[[], None], tempo: Tempo, lookup: Lookup | None = None) -> None:
        self._changed = changed
        self._tempo = tempo
        self._lookup = lookup or system_lookup
        self._answers: dict[str, tuple[str, ...]] = {}
        self._reasons: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(8)

    def want(self, names: Iterable[str]) -> None:
        """Follow exactly these names from now on."""
        wanted = dict.fromkeys(names)
        for name in [name for name in self._tasks if name not in wanted]:
            self._tasks.pop(name).cancel()
            self._answers.pop(name, None)
            self._reasons.pop(name, None)
        for name in wanted:
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(self._follow(name), name=f"fleet-dns {name}")

    def addresses(self, name: str) -> tuple[str, ...]:
        """The last good answer, sorted; empty before the first."""
        return self._answers.get(name, ())

    def reason(self, name: str) -> str:
        """Why the last look-up failed, "" when it did not."""
        return self._reasons.get(name, "")

    async def close(self) -> None:
        """Stop following."""
        tasks = list(self._tasks.values())
        self.want(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, name: str) -> None:
        while True:
            await self._look(name)
            # A name that never resolved holds an engine back, so it is tried faster.
            wait_s = self._tempo.pace.dns_s if name in self._answers else min(1.0, self._tempo.pace.dns_s)
            await asyncio.sleep(self._tempo.spread(wait_s))

    async def _look(self, name: str) -> None:
        try:
            async with self._slots, asyncio.timeout(self._tempo.pace.timeout_s):
                found = await self._lookup(name)
            reason = "" if found else "the name has no address"
        except TimeoutError:
            found, reason = [], "the name server does not answer"
        except (OSError, UnicodeError) as error:
            found, reason = [], f"the name cannot be resolved: {getattr(error, 'strerror', None) or error}"
        was_failing = name in self._reasons
        if reason:
            self._reasons[name] = reason
            if not was_failing:
                log.warning(f"{name}: {reason}; its known addresses are kept", addresses=len(self.addresses(name)))
            return
        self._reasons.pop(name, None)
        answer = tuple(sorted(set(found)))
        if was_failing:
            log.info(f"{name} resolves again", addresses=len(answer))
        if answer != self._answers.get(name):
            self._answers[name] = answer
            self._changed()


async def system_lookup(name: str) -> list[str]:
    """Ask the system's resolver, off the loop; IPv6 addresses only when there is no IPv4 one."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    by_family = {
        family: [str(address[0]) for kind, _, _, _, address in found if kind == family]
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    return by_family[socket.AF_INET] or [ip for ip in by_family[socket.AF_INET6] if "%" not in ip]
