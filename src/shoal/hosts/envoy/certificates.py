"""Certificates as secrets that Envoy reloads when they change.

Contents are embedded in the secrets' file, so a reload does not depend on how the operator replaces the
originals (in place, by rename or by a symlink).  A pair that does not load is refused and the old one stays.
"""

import ssl
from pathlib import Path

from shoal.hosts.envoy.files import write_resources
from shoal.hosts.envoy.settings import EnvoySettings
from shoal.hosts.envoy.typed import Document, typed
from shoal.hosts.filewatch import read_small
from shoal.kernel import ConfigError

LISTENER_SECRET = "listener"
_USUAL_ROOTS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


def system_roots() -> str:
    """Return the file with the roots that this system trusts; Envoy takes no directory.  Raises ConfigError."""
    for path in (ssl.get_default_verify_paths().cafile, *_USUAL_ROOTS):
        if path and Path(path).is_file():
            return path
    raise ConfigError("this system has no file of trusted roots for https backends: give ca_file, or set SSL_CERT_FILE")


def trust_secret(name: str) -> str:
    """Return the name of the secret that holds the roots of a TLS group."""
    return f"trust-{name}"


def write_certificates(settings: EnvoySettings) -> tuple[str, ...]:
    """Read certificates and roots again; returns digests, one per secret, that change when they do.

    Raises ConfigError when a file cannot be read or does not hold what it should.
    """
    # All are checked before the first is written.  Envoy takes one secret per file.
    secrets = _secrets(settings)
    return tuple(write_resources(settings.run_dir, "sds", [secret], secret["name"]) for secret in secrets)


def _secrets(settings: EnvoySettings) -> list[Document]:
    secrets = []
    if settings.tls is not None:
        chain, key = settings.tls.certificate, settings.tls.key
        try:
            texts = [_read(chain), _read(key)]
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)
        except (OSError, ValueError) as error:
            raise ConfigError(f"certificate and key {key} cannot be used: {error}", source=chain) from error
        names = ("certificate_chain", "private_key")
        pair = {name: {"inline_string": text} for name, text in zip(names, texts, strict=True)}
        secrets.append(_secret(LISTENER_SECRET, tls_certificate=pair))
    for group in settings.backend_tls:
        if not (group.ca and group.is_verified):
            continue
        try:
            roots = _read(group.ca)
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(group.ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"roots cannot be used: {error}", source=group.ca) from error
        context: Document = {"trusted_ca": {"inline_string": roots}}
        if group.sni:
            context["match_typed_subject_alt_names"] = [{"san_type": "DNS", "matcher": {"exact": group.sni}}]
        secrets.append(_secret(trust_secret(group.name), validation_context=context))
    return secrets


def _secret(name: str, **content: Document) -> Document:
    return typed("extensions.transport_sockets.tls.v3.Secret", name=name, **content)


def _read(path: str) -> str:
    return read_small(path).decode()
