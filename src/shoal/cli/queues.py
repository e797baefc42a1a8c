"""How the queue looks in `shoal status`: a line for it, one for each band, and a table of the tenants.

Owns the words and columns; names of tenants may come from clients, so nothing in them reaches the terminal but what can
be printed.
"""

from typing import TYPE_CHECKING, Any

from shoal.hosts.admin.queues import BandPicture, FlowPicture

if TYPE_CHECKING:
    from rich.table import Table

MAX_TENANTS = 8
"""Tenants of a band that are shown; `--json` has more."""


def queue_lines(flow: FlowPicture) -> list[str]:
    """Return what waits: a line for the queue, and one for each band in which somebody does or did of late."""
    if not flow.is_on:
        return []
    full = f"endpoints {flow.saturation:.0%} full"
    lines = [f"{flow.requests:,} wait in the queue  {flow.drain_per_s:.1f} leave a second  {full}"]
    for band in flow.bands:
        if band.requests or band.waits:
            longest = f", the first for {seconds(band.longest_s)}" if band.requests else ""
            lines.append(f"  band {band.priority}: {band.requests:,} wait{longest}{_of_late(band)}")
    return lines


def tenants_table(flow: FlowPicture) -> "Table | None":
    """Return the tenants of each band with their weight and what they got of late; None where there are none."""
    from rich.table import Table
    from rich.text import Text

    if not any(band.shares for band in flow.bands):
        return None
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("  BAND", justify="right", no_wrap=True)
    table.add_column("TENANT", overflow="fold")
    for name in ("WAIT", "WEIGHT", "SHARE", "TOKENS/S", "COMPUTED/S"):
        table.add_column(name, justify="right", no_wrap=True)
    for band in flow.bands:
        for share in band.shares[:MAX_TENANTS]:
            table.add_row(
                str(band.priority),
                Text(tenant_name(share.tenant)),
                f"{share.waiting:,}",
                "-" if share.weight is None else f"{share.weight:g}",
                "-" if share.share_ratio is None else f"{share.share_ratio:.0%}",
                f"{share.tokens_per_s:,.0f}",
                f"{share.computed_tokens_per_s:,.0f}",
            )
        if len(band.shares) > MAX_TENANTS:
            table.add_row(str(band.priority), Text(f"{len(band.shares) - MAX_TENANTS} more", style="dim"))
    return table


def ahead_words(explanation: dict[str, Any]) -> str:
    """Return who was ahead of a request, "" for nobody: how many in all, and the larger groups by tenant and band."""
    ahead = explanation.get("ahead") or 0
    if not ahead:
        return ""
    groups = explanation.get("ahead_by") or []
    named = [f"{each['requests']:,} of {tenant_name(each['tenant'])} in band {each['priority']}" for each in groups]
    others = ahead - sum(each["requests"] for each in groups)
    if groups and others > 0:
        named.append(f"{others:,} of others")
    return f"{ahead:,} ahead" + (f": {', '.join(named)}" if named else "")


def tenant_name(name: str) -> str:
    """Return how a tenant is called; what cannot be printed is not."""
    return printable(name) if name else "no tenant"


def printable(text: str) -> str:
    """Return a client's words for a terminal."""
    return "".join([letter if letter.isprintable() else "?" for letter in text])


def seconds(value: float | None) -> str:
    """Return a time, `-` where it is not known."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _of_late(band: BandPicture) -> str:
    if band.wait_p50_s is None:
        return ""
    return f"; of late p50 {seconds(band.wait_p50_s)}, p95 {seconds(band.wait_p95_s)}"
