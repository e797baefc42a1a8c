"""Drives an engine in virtual time for the tests of this folder."""

from shoal.engine import Emit, Engine, EngineConfig, Event, Finish, Submitted, Ticked
from shoal.engine.changes import CacheChanged, Change


class VirtualTime:
    """Feeds events, ticks at every deadline, and collects what comes out."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config)
        self.now = 0.0
        self.tokens: dict[str, int] = {}
        self.finished: dict[str, Finish] = {}
        self.changes: list[Change] = []
        self.steps = 0

    def send(self, event: Event) -> list[object]:
        """Handle one event now."""
        commands = self.engine.handle(event, self.now)
        for command in commands:
            if isinstance(command, Emit):
                for request_id, count in command.tokens:
                    self.tokens[request_id] = self.tokens.get(request_id, 0) + count
            elif isinstance(command, Finish):
                assert command.request_id not in self.finished
                self.finished[command.request_id] = command
            elif isinstance(command, CacheChanged):
                self.changes += command.changes
        return list(commands)

    def step(self) -> bool:
        """Run to the end of the step in progress; False when the engine is idle."""
        deadline = self.engine.deadline()
        if deadline is None:
            return False
        self.now = deadline
        self.send(Ticked())
        self.steps += 1
        return True

    def run(self, limit: int = 100_000) -> None:
        """Run until the engine is idle."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the engine never became idle")


def request(
    name: str, prompt: int, output: int, *, prefix: int = 0, block_size: int = 4, adapter: str = ""
) -> Submitted:
    """A request whose first `prefix` tokens are shared with every other request, the rest its own."""
    blocks = (prompt + output) // block_size
    shared = prefix // block_size
    hashes = tuple(1000 + position if position < shared else hash_of(name, position) for position in range(blocks))
    tokens = b"".join(tokens_of(block_hash, block_size) for block_hash in hashes)
    return Submitted(
        request_id=name,
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=output,
        block_hashes=hashes,
        adapter=adapter,
        tokens=tokens,
    )


def tokens_of(block_hash: int, block_size: int) -> bytes:
    """The tokens that stand for a block: each is its hash, cut to 32 bits."""
    return (block_hash % 2**32).to_bytes(4, "little") * block_size


def hash_of(name: str, position: int) -> int:
    """A block hash that only this request and position have."""
    return int.from_bytes(f"{name}/{position}".encode(), "little")
