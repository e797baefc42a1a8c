"""The direct plane against the other routers that choose by prefix, in one run: `make bench PEERS=1` is the table."""

import uvloop

from bench.bars.registry import Figure, bar
from bench.peers import PEERS, survey

OURS = "shoal, direct"


@bar("direct.peers", "CPU of a 16 KB request, all processes, over the cheapest peer's", at_most=1.0, part=2)
def peers(scale: float, ours: str = OURS) -> Figure:
    """Unique prompts, everybody routing by prefix; a peer that failed is not compared."""
    rows = {row.name: row for row in uvloop.run(survey(scale, peers=PEERS, ours=(ours,), is_small_wanted=False))}
    failed = {name: row.failed for name, row in rows.items() if row.failed}
    cpu_us = {name: sum(row.large_us.values()) for name, row in rows.items() if not row.failed and row.large_us}
    details = {"cpu_us": cpu_us, "failed": failed}
    why = "; ".join(f"{name} failed: {reason}" for name, reason in failed.items())
    if ours in failed:
        return Figure(value=float("nan"), void=f"{ours}: {failed[ours]}", details=details)
    others = [us for name, us in cpu_us.items() if name != ours]
    if not others:
        return Figure(value=float("inf"), why=why or "no peer was measured", details=details)
    return Figure(value=cpu_us[ours] / min(others), why=why, details=details)
