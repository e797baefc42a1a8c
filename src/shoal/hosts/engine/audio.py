"""The shape of /v1/audio/transcriptions and translations."""

import msgspec

from shoal.hosts.engine.answer import DONE, Answer
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.streams import Frame

_BYTES_PER_S = 32_000
_TOKENS_PER_S = 50


class AudioShape:
    """One transcript, whole or streamed.  seconds: of sound, by the file's size at 16 kHz and 16 bits."""

    __slots__ = ("_answer", "_format", "_seconds")

    def __init__(self, answer: Answer, response_format: str, seconds: int) -> None:
        self._answer = answer
        self._format = response_format
        self._seconds = seconds

    def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the unstreamed answer; bare text when `response_format` is `text`."""
        text = generations[0].text
        if self._format == "text":
            return text.encode()
        return msgspec.json.encode({"text": text, "usage": {"type": "duration", "seconds": self._seconds}})

    def preamble(self) -> list[bytes]:
        """Nothing comes before the first token."""
        return []

    def opening(self, generation: Generation) -> list[bytes]:
        """Nothing but the first token itself."""
        return []

    def frame(self, generation: Generation) -> Frame | None:
        """All chunks look alike but the last."""
        prefix = (
            b'data: {"id":"trsc-%b","object":"transcription.chunk","created":%d,"model":%b,"choices":[{"delta":'
            b'{"content":"'
        ) % (self._answer.id.encode(), self._answer.created, msgspec.json.encode(self._answer.model))
        suffix = b'"},"finish_reason":null,"stop_reason":null}]}\n\n'
        last = b'"},"finish_reason":"%b","stop_reason":null}]}\n\n' % generation.reason.encode()
        return Frame(prefix, suffix, last)

    def token(self, generation: Generation, position: int) -> bytes:
        """Never asked: `frame` is constant."""
        raise NotImplementedError

    def aborted(self, generation: Generation) -> list[bytes]:
        """A chunk without text that has the reason."""
        frame = self.frame(generation)
        return [] if frame is None else [frame.prefix + frame.last]

    def closing(self, generations: list[Generation]) -> list[bytes]:
        """The end mark."""
        return [DONE]


def seconds_of(sound: bytes) -> int:
    """Return how long a sound file lasts, at least 1 s."""
    return max(len(sound) // _BYTES_PER_S, 1)


def prompt_tokens_of(sound: bytes) -> int:
    """Return the tokens of a sound: 50 a second, as Whisper's encoder makes of its 30 s window."""
    return seconds_of(sound) * _TOKENS_PER_S
