"""What a stream of either server does with a message, and the names that Envoy calls them by.

Shared by `service` (grpc.aio, for gateways that are not ours) and `lean` (for our own Envoy).
"""

import logging
from typing import Any

from shoal.hosts.envoy import decode_records
from shoal.hosts.picker import Picker
from shoal.routing import Recorded

log = logging.getLogger("shoal.extproc")

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG = "envoy.service.accesslog.v3.AccessLogService"
# The services that the endpoint picker protocol asks for; liveness is SERVING for as long as the process answers.
LIVENESS = "liveness"
HEALTH_SERVICES = ("", LIVENESS, "readiness", EXT_PROC)
# A buffered body comes in one message, with its protobuf frame around it.
MESSAGE_OVERHEAD_BYTES = 1 << 20


def note_unplaced(picker: Picker, error: Exception) -> None:
    """Count and log what went wrong with a request; the stream has to end with an error.

    A bug in a decision or a plugin costs this request its placement, not its answer: ending the stream lets Envoy apply
    the failure mode that the operator chose.
    """
    picker.driver.fold.unplaced.add()
    log.error("a request could not be placed; Envoy applies its failure mode", exc_info=error)


def take_records(picker: Picker, message: Any) -> None:
    """Feed the records of one StreamAccessLogsMessage to the router."""
    driver = picker.driver
    for record in decode_records(message):
        if record.request_id:
            driver.feed(Recorded(record.request_id, record.outcome))
        elif not record.picker and record.outcome.served_address:
            # Envoy's own refusals reach no engine; what reached one without a picker is what fail-open let through.
            driver.fold.unrouted(record.outcome)
