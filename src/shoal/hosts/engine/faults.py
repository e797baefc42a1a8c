"""Faults that tests and demonstrations inject into an embedded engine."""

import msgspec


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong.  POST /faults takes these fields as JSON and changes only those it names."""

    fail_rate: float = 0.0
    """Share of API requests, 0 to 1, that get `fail_status` instead of an answer."""
    fail_status: int = 500
    """Status of an injected failure."""
    stall_after: int | None = None
    """A stream goes silent after this many tokens and stays open; None never."""
    cut_after: int | None = None
    """The connection of a stream is reset after this many tokens; 0 resets every API request before its head."""
    slow_factor: float = 1.0
    """Multiplies the time of every engine step."""
    is_healthy: bool = True
    """False makes /health answer 503 while everything else works."""
    kv_drop_batches: int = 0
    """So many next batches of KV events are not sent; they count in the sequence, and a replay has them."""
    is_kv_replay_stalled: bool = False
    """Replays of KV events are not answered until this is False again."""

    def __post_init__(self) -> None:
        if not 0 <= self.fail_rate <= 1:
            raise ValueError("fail_rate must be between 0 and 1")
        if self.slow_factor <= 0:
            raise ValueError("slow_factor must be above 0")
        if self.kv_drop_batches < 0:
            raise ValueError("kv_drop_batches must not be below 0")


def change(faults: Faults, body: bytes) -> Faults:
    """Return `faults` with the fields that the JSON object `body` names.  Raises msgspec.MsgspecError."""
    asked = msgspec.json.decode(body, type=dict[str, object])
    return msgspec.convert({**msgspec.structs.asdict(faults), **asked}, type=Faults)


class FaultBox:
    """The faults in force, shared by all requests of a server.  hits_streams: whether a token must look at them."""

    __slots__ = ("faults", "hits_streams")

    def __init__(self, faults: Faults) -> None:
        self.put(faults)

    def put(self, faults: Faults) -> None:
        """Put other faults in force."""
        self.faults = faults
        self.hits_streams = faults.cut_after is not None or faults.stall_after is not None
