"""The endpoints whose load is not known, as status warns of them.

Owns the wording for many at once.  What is wrong with one engine's metrics page is said by `hosts.fleet`.
"""

from collections.abc import Iterable

from shoal.hosts.fleet import EndpointReport

_NAMED = 5


def load_warnings(reports: Iterable[EndpointReport]) -> list[str]:
    """Return one line per problem, with the endpoints that have it."""
    urls: dict[str, list[str]] = {}
    for report in reports:
        if report.load_problem:
            urls.setdefault(report.load_problem, []).append(report.url)
    return [f"the load of {_named(those)} is not known: /metrics: {problem}" for problem, those in urls.items()]


def _named(urls: list[str]) -> str:
    more = len(urls) - _NAMED
    return ", ".join(urls[:_NAMED]) + (f" and {more} more" if more > 0 else "")
