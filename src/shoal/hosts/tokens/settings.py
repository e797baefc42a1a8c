"""Which backend gives the tokens of which model.

Owns the choice alone; what a backend does is its own module's.
"""

from pathlib import Path
from typing import NamedTuple


class Backend(NamedTuple):
    """Where the tokens of a model come from; with neither path nor url from the engines themselves.

    model: the only one that it is for, "" for every model.  path: of a model directory.  url: of a server that renders.
    """

    model: str = ""
    path: Path | None = None
    url: str = ""
    timeout_s: float = 5.0
    media_timeout_s: float = 30.0


class TokenSettings(NamedTuple):
    """What `Tokenizers` goes by.

    backends: the first one that is for a model, or for all, is taken; none at all means the engines themselves.
    budget_bytes: of what each local tokenizer remembers; a conversation of 50,000 tokens takes about 300 KB.
    max_body_bytes: longer requests go by the estimate; 8 MiB of JSON hold over a million tokens.
    threads: that tokenise.  max_waiting, max_waiting_bytes: requests and their bodies that wait for a thread or an
    engine; past these further ones go by the estimate at once.
    """

    backends: tuple[Backend, ...] = ()
    budget_bytes: int = 64 << 20
    max_body_bytes: int = 8 << 20
    threads: int = 1
    max_waiting: int = 256
    max_waiting_bytes: int = 64 << 20

    def backend_of(self, model: str) -> Backend | None:
        """Return the backend of a model, None where one is configured, but not for it."""
        if not self.backends:
            return Backend()
        return next((each for each in self.backends if each.model in ("", model)), None)
