"""Signals of an engine out of its Prometheus page, reading only the families that are needed.

Owns the text format (Prometheus 0.0.4) as far as engines use it.  Which families mean what for which engine is in
`engine_metrics`.  A full parse of a vLLM page costs milliseconds and an engine is read many times a second, so the
page is cut at its TYPE lines and everything else is never looked at.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from shoal.kernel import InvalidInput

MAX_PAGE_BYTES = 8 * 1024 * 1024

_TYPE = b"\n# TYPE "


class Sample(NamedTuple):
    """One line.  labels: the text between the braces, b"" when there are none.  value: NaN as it came."""

    labels: bytes
    value: float


class Page:
    """A metrics page, cut into families; a family is read when it is asked for."""

    __slots__ = ("_families",)

    def __init__(self, text: bytes) -> None:
        """Raises InvalidInput for a page that is far larger than any engine's."""
        if len(text) > MAX_PAGE_BYTES:
            raise InvalidInput(f"the metrics page is larger than {MAX_PAGE_BYTES} bytes")
        self._families = _cut(b"\n" + text)

    def has_prefix(self, prefix: bytes) -> bool:
        """Whether any family's name starts with `prefix`."""
        if b"" in self._families:
            return b"\n" + prefix in self._families[b""]
        return any(name.startswith(prefix) for name in self._families)

    def samples(self, name: bytes, family: bytes = b"") -> list[Sample]:
        """Return the samples whose name is exactly `name`, in page order; [] when the page has none.

        family: their family where it has another name, as that of a histogram's sums and buckets.
        """
        # OpenMetrics names a counter's family without the suffix of its samples.
        block = self._families.get(family or name) or self._families.get(name.removesuffix(b"_total"))
        if block is None:
            block = self._families.get(b"")
        return [] if block is None else list(_samples(block, name))


def _cut(text: bytes) -> dict[bytes, bytes]:
    """Return family name -> its text.  A page without TYPE lines is one block under b""."""
    first, *blocks = text.split(_TYPE)
    families: dict[bytes, bytes] = {}
    repeated: dict[bytes, list[bytes]] = {}
    for block in blocks:
        name, _, rest = block.partition(b" ")
        if name in families:
            repeated.setdefault(name, []).append(rest)
        else:
            families[name] = rest
    for name, more in repeated.items():
        families[name] = b"\n".join((families[name], *more))
    if not families:
        families[b""] = first
    return families


def _samples(block: bytes, name: bytes) -> Iterator[Sample]:
    size = len(name)
    starts = b"\n" + name
    at = 0 if block.startswith(name) else block.find(starts) + 1
    # The walk goes from hit to hit, so that a page of other lines costs one search however long it is.
    while at > 0 or (at == 0 and block.startswith(name)):
        end = block.find(b"\n", at)
        line = block[at:] if end < 0 else block[at:end]
        at = -1 if end < 0 else block.find(starts, end) + 1 or -1
        after = line[size : size + 1]
        if after == b"{":
            close = line.rfind(b"}")
            labels, rest = line[size + 1 : close], line[close + 1 :]
        elif after in (b" ", b"\t"):
            labels, rest = b"", line[size:]
        else:
            continue
        try:
            yield Sample(labels, float(rest.split(None, 1)[0]))
        except (ValueError, IndexError):
            continue


_LABELS: dict[bytes, re.Pattern[bytes]] = {
    name: re.compile(rb"(?:^|,)\s*" + name + rb'\s*=\s*"((?:[^"\\]|\\.)*)"')
    for name in (
        b"block_size",
        b"num_gpu_blocks",
        b"page_size",
        b"num_pages",
        b"max_lora",
        b"running_lora_adapters",
        b"waiting_lora_adapters",
        b"dp_rank",
        b"request_type",
        b"kv_cache_block_type",
        b"mode",
        b"stage",
    )
}


def label(sample: Sample, name: bytes) -> str | None:
    """Return the value of one of the labels that engines' metrics are told apart by, None when it is absent."""
    found = _LABELS[name].search(sample.labels)
    if found is None:
        return None
    text = found[1].decode("utf-8", "replace")
    return text.replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\") if "\\" in text else text


def finite(value: float) -> float | None:
    """Return `value`, or None for NaN and the infinities: an engine that says these says nothing."""
    return value if math.isfinite(value) else None
