"""Our own Envoy: its configuration, its process, and what its access log says.

Here belongs everything that writes for Envoy or reads from it.  What is decided about a request does not,
nor the gRPC server that Envoy asks (hosts.extproc).
"""

from shoal.hosts.envoy.admin import EnvoyAdmin
from shoal.hosts.envoy.bootstrap import write_config
from shoal.hosts.envoy.certificates import write_certificates
from shoal.hosts.envoy.endpoints import EndpointAddress, loaded, write_endpoints
from shoal.hosts.envoy.process import EnvoyFailed, EnvoyProcess
from shoal.hosts.envoy.records import Record, decode_records
from shoal.hosts.envoy.settings import (
    BackendTls,
    EnvoySettings,
    FailureMode,
    ListenerTls,
    Picker,
)

__all__ = [
    "BackendTls",
    "EndpointAddress",
    "EnvoyAdmin",
    "EnvoyFailed",
    "EnvoyProcess",
    "EnvoySettings",
    "FailureMode",
    "ListenerTls",
    "Picker",
    "Record",
    "decode_records",
    "loaded",
    "write_certificates",
    "write_config",
    "write_endpoints",
]
