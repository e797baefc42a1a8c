"""Access loggers: one gRPC stream of records to each picker, so a record meets the booking it belongs to.

Owns which facts a record carries; `records` reads them.
"""

from shoal.hosts.envoy.filters import METADATA
from shoal.hosts.envoy.settings import EnvoySettings, Picker
from shoal.hosts.envoy.typed import Document, extension, seconds
from shoal.hosts.envoy.usage import NAMESPACE

RECORD_TAG = "shoal"
RECORD_FIELDS = (
    f"%DYNAMIC_METADATA({METADATA})%",
    f"%DYNAMIC_METADATA({NAMESPACE})%",
    "%RESPONSE_CODE%",
    "%UPSTREAM_REMOTE_ADDRESS%",
    "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%",
    "%COMMON_DURATION(DS_RX_END:US_RX_BODY_BEG:us)%",
    "%BYTES_SENT%",
    "%RESPONSE_FLAGS%",
    "%RESPONSE_CODE_DETAILS%",
)
"""What a record says, in order and with tabs between: one text is read three times faster than an entry's fields.

What Envoy does not know reads `-` or is empty.  Nothing here is a client's own text.
"""
# Envoy drops records when this much waits for a stream that is behind; its default of 16 KiB loses some in every burst.
# A record is about 1 KiB, and a message must stay under gRPC's 4 MiB.
_BUFFER_BYTES = 2 * 1024 * 1024


def picker_cluster(picker: Picker) -> str:
    """Return the name of the cluster that holds only this worker."""
    return f"picker-{picker.id}"


def access_loggers(settings: EnvoySettings) -> list[Document]:
    """Return one logger per picker; requests that no picker saw are reported to the first."""
    return [_logger(settings, picker, is_first=not place) for place, picker in enumerate(settings.pickers)]


def _logger(settings: EnvoySettings, picker: Picker, *, is_first: bool) -> Document:
    own = {"filter": METADATA, "path": [{"key": "picker"}], "value": {"string_match": {"exact": picker.id}}}
    logger = extension(
        "envoy.access_loggers.http_grpc",
        "extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
        common_config={
            "log_name": picker.id,
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": picker_cluster(picker)}},
            "buffer_size_bytes": _BUFFER_BYTES,
            "buffer_flush_interval": seconds(settings.clocks.records_flush_s),
            "custom_tags": [{"tag": RECORD_TAG, "value": "\t".join(RECORD_FIELDS)}],
        },
    )
    logger["filter"] = {"metadata_filter": {"matcher": own, "match_if_key_not_found": is_first}}
    return logger
