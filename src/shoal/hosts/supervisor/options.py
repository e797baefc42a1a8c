"""What `shoal up` was asked for.

Values only, as the command line gave them; what the configuration file says is separate and may change while the pool
runs.
"""

from pathlib import Path

import msgspec

from shoal.kernel import ConfigError

NOTHING_TO_SERVE = (
    "nothing to put behind the endpoint; say what, for example:\n"
    "  shoal up --engines 4                                  embedded engines, no GPU needed\n"
    "  shoal up --backend http://10.0.0.1:8000               a running vLLM or SGLang (repeatable)\n"
    "  shoal up --backends-file backends.yaml                a list that is followed while it runs"
)

MAX_WORKERS = 128
"""Pickers of one pool: twice as many run during an upgrade, and a picker hears 256 peers at most."""
MAX_ENGINES = 256
"""Embedded engines of one pool; more are modelled by the twin."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal up`.

    engines: embedded ones to start.  backends: URLs.  config: configuration file, None for the defaults.  host, port,
    metrics_port, data_plane, drain_s: None for what the configuration says; port 0 takes a free one, metrics_port 0 is
    none.
    engines and workers are limited: a slip of the finger must not fill the machine with processes.
    workers: picker processes.  run_dir: None for the default of the port.  model, engine_args: for embedded engines.
    """

    engines: int = 0
    backends: tuple[str, ...] = ()
    backends_file: Path | None = None
    config: Path | None = None
    host: str | None = None
    port: int | None = None
    data_plane: str | None = None
    workers: int = 1
    run_dir: Path | None = None
    metrics_port: int | None = None
    model: str = ""
    engine_args: tuple[str, ...] = ()
    log_format: str = "text"
    log_level: str = "info"
    seed: int = 0
    drain_s: float | None = None

    def check(self) -> None:
        """Raise ConfigError when the flags make no pool."""
        if not (self.engines or self.backends or self.backends_file or self.config):
            raise ConfigError(NOTHING_TO_SERVE)
        if self.engines < 0:
            raise ConfigError("must not be negative", source="--engines")
        if self.engines > MAX_ENGINES:
            raise ConfigError(f"must be at most {MAX_ENGINES}, each is a process", source="--engines")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"must be 1 to {MAX_WORKERS}, each is a process", source="--workers")
        for flag, port in (("--port", self.port), ("--metrics-port", self.metrics_port)):
            if port is not None and not 0 <= port < 65536:
                raise ConfigError("must be a number of 0 to 65535", source=flag)
        if self.port and self.port == self.metrics_port:
            raise ConfigError("must differ from --port", source="--metrics-port")
        if (self.model or self.engine_args) and not self.engines:
            raise ConfigError("is for embedded engines; add --engines N", source="--model or --engine-arg")
