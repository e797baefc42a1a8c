"""`shoal twin fit --metrics`: pages of an engine's metrics, from files or scraped for a while, and what they tell.

Owns how pages are got and what is printed; the fitting is `simulation.scraped`.
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table

from shoal.cli.inputs import read_files
from shoal.kernel import ConfigError, InvalidInput
from shoal.wire.engine_totals import Totals, read_totals
from shoal.wire.exposition import MAX_PAGE_BYTES

if TYPE_CHECKING:
    from shoal.simulation.scraped import ScrapedFit

__all__ = ["lines_of", "read_scrapes", "show_scraped"]

_TIMEOUT_S = 5.0
_LEAST_EVERY_S = 0.1


def read_scrapes(console: Console, sources: Sequence[str], for_s: float, every_s: float) -> list[tuple[float, Totals]]:
    """Return what pages counted, and when they were taken: of files `every_s` apart, or of one address, for `for_s`.

    Raises ConfigError, for a first page that is not vLLM's at once.
    """
    if not any(source.startswith(("http://", "https://")) for source in sources):
        if not every_s:
            raise ConfigError("is needed with files: how far apart they were scraped", source="--every")
        if for_s:
            raise ConfigError("is for an address; files are what they are", source="--for")
        return [(place * every_s, _read(Path(source))) for place, source in enumerate(sources)]
    if len(sources) > 1:
        raise ConfigError("takes one address, of one engine, or files of its pages", source="--metrics")
    if not for_s:
        raise ConfigError("is needed with an address: how long to scrape it, as 10m", source="--for")
    return _scraped(console, sources[0], for_s, max(every_s or 15.0, _LEAST_EVERY_S))


def _scraped(console: Console, url: str, for_s: float, every_s: float) -> list[tuple[float, Totals]]:
    """Scrape until the time is over; Ctrl-C ends it early, with what there is."""
    begin = time.monotonic()
    pages = [(0.0, _fetch(url))]
    with Progress("scraping", BarColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=for_s)
        try:
            while (passed_s := time.monotonic() - begin) < for_s:
                bar.update(task, completed=passed_s)
                time.sleep(min(every_s, max(for_s - passed_s, 0.0)))
                try:
                    pages.append((time.monotonic() - begin, _fetch(url)))
                except ConfigError as error:
                    console.print(f"{error}; going on", markup=False, style="yellow")
        except KeyboardInterrupt:
            console.print("interrupted; what was scraped until now is taken")
    return pages


def _fetch(url: str) -> Totals:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            page: bytes = answer.read(MAX_PAGE_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise ConfigError(f"cannot be scraped: {error.code} {error.reason}", source=url) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(f"cannot be scraped: {getattr(error, 'reason', error)}", source=url) from None
    return _counted(page, url)


def _read(path: Path) -> Totals:
    (page,) = read_files((path,), MAX_PAGE_BYTES)
    return _counted(page, str(path))


def _counted(page: bytes, source: str) -> Totals:
    try:
        return read_totals(page)
    except InvalidInput as error:
        raise ConfigError(str(error), source=source) from None


def show_scraped(console: Console, found: "ScrapedFit", base: str) -> None:
    """Print what was found, what was kept, and how well it fits."""
    from shoal.simulation.scraped import SPEEDS

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("TIME OF")
    table.add_column("against the base", justify="right")
    table.add_column("± %", justify="right")
    for speed in SPEEDS:
        if speed in found.factors:
            table.add_row(_MEANINGS[speed], f"x {found.factors[speed]:.2f}", f"{found.spread[speed] * 100:.0f}")
        else:
            table.add_row(_MEANINGS[speed], "kept", "")
    table.add_row("a request before its queue", f"{found.request_s * 1e3:.1f} ms", "")
    console.print(table)
    for line in lines_of(found):
        console.print(f"  {line}", highlight=False, markup=False)
    console.print(
        f"Means tell no more: what is kept, and shares within compute and within memory, are those of {base}.  A "
        "journal of the pool tells them, too.",
        markup=False, highlight=False,
    )  # fmt: skip


def lines_of(found: "ScrapedFit") -> list[str]:
    """Return how well it fits, in words."""
    judged = f"{found.held_out} later" if found.held_out else "the same, as there are too few to hold some out"
    return [
        f"{found.requests:,} requests in {found.windows} windows between scrapes; on {judged}:",
        *(
            f"mean time of a {name}: off by {error.median * 100:.1f} % (median), {error.p90 * 100:.1f} % (p90)"
            for name, error in (("decoded token", found.decode), ("prefill", found.prefill))
        ),
    ]


_MEANINGS = {
    "compute": "computing a token, and a pair of tokens",
    "memory": "reading the weights, and a token of KV",
    "overhead": "each step, and each sequence of it",
}
