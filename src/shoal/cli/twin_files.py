"""Files that the twin reads: experiments, configurations of routers, traces.

Owns where they are looked for, and how much of them is read.
"""

import lzma
import tarfile
import zlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from shoal.cli.inputs import files_at, journals_at, read_files
from shoal.kernel import ConfigError, InvalidInput
from shoal.routing.journal import read
from shoal.simulation import Experiment, Session, read_experiment
from shoal.simulation.experiment import Perf, Trace, sessions_of, with_perf

__all__ = ["MAX_TRACE_BYTES", "beside", "experiment_of", "read_journal_files", "read_text", "recorded_sessions"]

MAX_TRACE_BYTES = 2 << 30
"""Of all files of a trace, or of all journals, together: they are held in memory."""

_MAX_TEXT_BYTES = 16 << 20
_SUFFIXES = {"claude-code": ".json", "journal": ".journal"}


def read_text(path: Path) -> str:
    """Return a file's text.  Raises ConfigError."""
    (data,) = read_files((path,), _MAX_TEXT_BYTES)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError("is no text in UTF-8", source=str(path)) from None


def beside(source: Path, name: str) -> Path:
    """A path as the user gives it, or as it stands in a file: seen from the working directory, else from that file."""
    path = Path(name)
    return path if path.is_absolute() or path.exists() else source.parent / path


def experiment_of(text: str, source: Path) -> Experiment:
    """Return an experiment with what the file of its workload says.  Raises ConfigError or InvalidInput."""
    experiment = read_experiment(text, str(source), lambda name: read_text(beside(source, name)))
    if not isinstance(experiment.workload, Perf):
        return experiment
    path = beside(source, experiment.workload.path)
    try:
        return with_perf(experiment, read_text(path))
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error


def recorded_sessions(experiment: Experiment, source: Path) -> list[Session] | None:
    """Return the sessions of an experiment's trace; None when it has none.  Raises ConfigError or InvalidInput."""
    trace = experiment.workload
    return _read(trace, beside(source, trace.path)) if isinstance(trace, Trace) else None


@lru_cache(maxsize=1)
def _read(trace: Trace, path: Path) -> list[Session]:
    """Every run of a trace needs the same sessions, and the largest take a minute to read."""
    try:
        return sessions_of(trace, _files(path, trace))
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error


def read_journal_files(paths: Iterable[Path]) -> list[bytes]:
    """Return journals' files; a folder stands for all in it.  Raises ConfigError or InvalidInput."""
    found = [each for path in paths for each in journals_at(path)]
    files = read_files(found, MAX_TRACE_BYTES)
    for path, data in zip(found, files, strict=True):
        try:
            read(data)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from error
    return files


def _files(path: Path, trace: Trace) -> list[bytes]:
    """Read a trace: one file, or all of a folder or of an archive."""
    suffix = _SUFFIXES.get(trace.format, "")
    limit = trace.last if trace.format == "claude-code" else 0
    try:
        if suffix == ".json" and path.is_file() and tarfile.is_tarfile(path):
            return _packed(path, suffix, limit)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InvalidInput(f"the archive is damaged or not whole: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", source=str(path)) from None
    return read_files(files_at(path, suffix)[: limit or None], MAX_TRACE_BYTES)


def _packed(path: Path, suffix: str, limit: int) -> list[bytes]:
    """Read the files of an archive in their order, without unpacking it to the disk."""
    files: list[bytes] = []
    left = MAX_TRACE_BYTES
    with tarfile.open(path) as archive:
        for member in archive:
            if limit and len(files) >= limit:
                break
            if member.isfile() and member.name.endswith(suffix):
                left -= member.size
                if left < 0:
                    raise InvalidInput(f"unpacks to more than {MAX_TRACE_BYTES} bytes; set `limit`")
                opened = archive.extractfile(member)
                if opened is not None:
                    files.append(opened.read())
    return files
