"""Streams whose chunks say when they were written: how much later than their engine a client sees each gap.

While streams run only times and pieces are kept; everything is read out of them afterwards.
"""

import asyncio
import gc
import re
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from bench.processes import total_cpu_s
from bench.prompts import Prompts

_STAMP = re.compile(rb'"t":(\d+\.\d{6})')
_OPEN_WITHIN_S = 10.0
# Chunks of the first moments pass while other streams are still being opened.
_SETTLE_S = 0.5
_SMALL_CHARS = 400


class Gaps(NamedTuple):
    """What was seen of the gaps.

    added_s: for each pair of chunks the client's gap less the engine's.  cores: CPU that the router used meanwhile.
    missing: chunks that did not come.
    """

    added_s: npt.NDArray[np.float64]
    cores: float
    chunks_per_s: float
    missing: int

    def quantile_ms(self, q: float) -> float:
        """A quantile of the added gaps in ms, infinity when there is none."""
        return float(np.quantile(self.added_s, q)) * 1e3 if len(self.added_s) else float("inf")


async def watch(
    urls: Sequence[str], *, streams: int, pace_s: float, seconds: float, pids: Callable[[], list[int]] = list
) -> Gaps:
    """Hold so many streams open for `seconds`, one chunk per `pace_s` each, spread over `urls`."""
    loop = asyncio.get_running_loop()
    chunks = max(3, round((seconds + _SETTLE_S) / pace_s))
    headers = {"x-bench-chunks": str(chunks), "x-bench-pace-us": str(round(pace_s * 1e6)), "x-bench-stamp": "1"}
    opened: list[_Stream] = []
    gc.collect()
    gc.disable()  # a pause of this process is no gap of the router
    try:
        for i in range(streams):
            parts = urlsplit(urls[i % len(urls)])
            prompts = Prompts(parts.netloc, _SMALL_CHARS, stream=True, headers=headers)
            stream = _Stream(b"".join(prompts.take()))
            await loop.create_connection(partial(_same, stream), parts.hostname or "127.0.0.1", parts.port or 80)
            opened.append(stream)
            # Beats of their own: streams that began in one moment would all be served in one batch.
            await asyncio.sleep(pace_s / 7 if i % 7 else 0)
        async with asyncio.timeout(_OPEN_WITHIN_S):
            while not all(stream.times for stream in opened):
                await asyncio.sleep(0.02)
        await asyncio.sleep(_SETTLE_S)
        began, before = perf_counter(), total_cpu_s(pids())
        await asyncio.sleep(max(0.2, seconds - _SETTLE_S))
        ended, after = perf_counter(), total_cpu_s(pids())
        async with asyncio.timeout(seconds + 30.0):
            await asyncio.gather(*(stream.ended for stream in opened))
    finally:
        gc.enable()
        for stream in opened:
            stream.close()
        await asyncio.sleep(0)
    seen = [stream.read() for stream in opened]
    added = [np.diff((come - sent)[(sent >= began) & (sent < ended)]) for come, sent in seen]
    count = sum(len(each) for each in added)
    missing = sum(chunks - len(sent) for _, sent in seen)
    rate = count / (ended - began)
    return Gaps(np.concatenate(added), (after - before) / (ended - began), rate, missing)


class _Stream(asyncio.Protocol):
    """One stream: sends its request, keeps what comes and when."""

    def __init__(self, request: bytes) -> None:
        self.times: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._pieces: list[bytes] = []
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.times.append(perf_counter())
        self._pieces.append(data)
        self._tail = (self._tail + data[-7:])[-7:]
        if self._tail == b"\r\n0\r\n\r\n":
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end()

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def read(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Per chunk: when it had come, and when its engine wrote it."""
        found = list(_STAMP.finditer(b"".join(self._pieces)))
        ends = np.cumsum([len(piece) for piece in self._pieces])
        at = np.searchsorted(ends, np.array([each.end() for each in found], dtype=np.int64))
        return np.array(self.times)[at], np.array([float(each[1]) for each in found], dtype=np.float64)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _same(stream: _Stream) -> _Stream:
    return stream
