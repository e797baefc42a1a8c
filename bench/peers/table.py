"""The table of routers, for people."""

from collections.abc import Sequence

from rich.table import Table

from bench.peers.rounds import NOBODY, Row

_COLUMNS = ("router", "version", "CPU, 1 KB", "CPU, 16 KB", "p50, 1 conn.", "req/s, 1 KB", "RSS before, after", "flags")


def table(rows: Sequence[Row], foreign_cores: float) -> Table:
    """Make it.  foreign_cores: what other processes used meanwhile."""
    made = Table(title="Routers in front of the same backends: CPU of the whole process tree per request, all unique")
    for name in _COLUMNS:
        made.add_column(name, justify="right" if name[:3] in ("CPU", "p50", "req", "RSS") else "left")
    nobody = next((row for row in rows if row.name == NOBODY), None)
    for row in rows:
        if row.failed:
            made.add_row(row.name, row.version, "failed", "", "", "", "", row.failed)
        elif row is nobody:
            made.add_row(row.name, "", "", "", f"{row.p50_ms:.2f} ms", "", "", "")
        else:
            made.add_row(
                row.name,
                row.version,
                _cost(row.small_us),
                _cost(row.large_us),
                f"{row.p50_ms:.2f} ms",
                f"{row.requests_per_s:,.0f}",
                f"{row.rss_mb[0]:,.0f}, {row.rss_mb[1]:,.0f} MB",
                row.flags,
            )
    made.caption = (
        f"16 in flight, 4 endpoints, medians of 3 rounds; other processes used {foreign_cores:.1f} cores.  "
        "A router that failed is not compared."
    )
    return made


def _cost(parts: dict[str, float]) -> str:
    total = f"{sum(parts.values()):,.0f} us"
    if len(parts) < 2:
        return total
    return total + "\n" + "\n".join(f"{name} {us:,.0f}" for name, us in parts.items())
