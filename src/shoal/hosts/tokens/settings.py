"""Which backend gives the tokens of which model.

Owns the choice alone; what a backend does is its own module's.
"""

from pathlib import Path
from typing import NamedTuple

from shoal.hosts.backends import read_api_key
from shoal.routing.config import RouterConfig


class Backend(NamedTuple):
    """Where the tokens of a model come from; with neither path nor url from the engines themselves.

    model: the only one that it is for, "" for every model.  path: of a model directory.  url: of a server that renders.
    authorization: value of the header that this server wants, "" for none.
    """

    model: str = ""
    path: Path | None = None
    url: str = ""
    authorization: str = ""
    timeout_s: float = 5.0
    media_timeout_s: float = 30.0


class TokenSettings(NamedTuple):
    """What `Tokenizers` goes by.

    backends: the first one that is for a model, or for all, is taken; none at all means the engines themselves.
    budget_bytes: of what each local tokenizer remembers; a conversation of 50,000 tokens takes about 300 KB.
    max_body_bytes: longer requests go by the estimate; 8 MiB of JSON hold over a million tokens.
    threads: that tokenise.  max_waiting, max_waiting_bytes: requests and their bodies that wait for a thread or an
    engine; past these further ones go by the estimate at once.  forwards_client_key: whether engines without a key of
    their own are shown the client's, as with the request itself.
    """

    backends: tuple[Backend, ...] = ()
    budget_bytes: int = 64 << 20
    max_body_bytes: int = 8 << 20
    threads: int = 1
    max_waiting: int = 256
    max_waiting_bytes: int = 64 << 20
    forwards_client_key: bool = False

    def backend_of(self, model: str) -> Backend | None:
        """Return the backend of a model, None where one is configured, but not for it."""
        if not self.backends:
            return Backend()
        return next((each for each in self.backends if each.model in ("", model)), None)


def settings_of(config: RouterConfig) -> TokenSettings:
    """Return what a configuration says; without a backend the engines are asked.

    Raises ConfigError when a key cannot be read.
    """
    producer = config.tokens
    backend = Backend(producer.model_name)
    if producer.local is not None:
        backend = backend._replace(path=Path(producer.local.path))
    elif producer.vllm is not None:
        vllm = producer.vllm
        key = f"Bearer {read_api_key(Path(vllm.api_key_file))}" if vllm.api_key_file else ""
        backend = backend._replace(
            url=vllm.url, authorization=key, timeout_s=vllm.timeout_s, media_timeout_s=vllm.mm_timeout_s
        )
    return TokenSettings(backends=(backend,), forwards_client_key=config.pool.forward_client_key)
