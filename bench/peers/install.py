"""Gets a peer's program: from a virtual environment of its own that is made once, or from the PATH."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.peers.catalog import Peer

DIRECTORY = Path(__file__).parents[2] / ".bench-peers"
_SYSTEM = "/usr/sbin:/usr/local/sbin:/sbin"
_WAIT_S = 600.0


class NotInstalled(Exception):
    """A peer's program is not to be had; says why."""


def program_of(peer: Peer, directory: Path = DIRECTORY) -> str:
    """Return the path of a peer's program, installing it first where that is possible.  Raises NotInstalled."""
    if not peer.package:
        found = shutil.which(peer.program, path=f"{os.environ.get('PATH', '')}:{_SYSTEM}")
        if found is None:
            raise NotInstalled(f"{peer.program} is not on the PATH; install it with the system's package manager")
        return found
    home = directory / f"{peer.package}-{peer.version}"
    program = home / "bin" / peer.program
    if not program.exists():
        _install(f"{peer.package}=={peer.version}", home)
    if not program.exists():
        raise NotInstalled(f"{peer.package}=={peer.version} brings no program {peer.program}")
    return str(program)


def version_of(peer: Peer, program: str) -> str:
    """Return a peer's version; a program of the system is asked."""
    if peer.version:
        return peer.version
    said = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=10, check=False)
    return (said.stdout + said.stderr).strip().rpartition("/")[2]


def _install(what: str, home: Path) -> None:
    """Make the environment under another name first, so that one that was cut short is not taken for whole."""
    print(f"installing {what} into {home} ...", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True, timeout=_WAIT_S)
        words = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what]
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=_WAIT_S)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(home, ignore_errors=True)
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise NotInstalled(f"{what} cannot be installed: {said[-1] if said else error}") from error
