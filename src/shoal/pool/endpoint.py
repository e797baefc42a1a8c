"""One engine that can serve requests, as an address with labels and models."""

from enum import StrEnum

import msgspec

from shoal.pool.kvevents import KvSource


class EndpointState(StrEnum):
    """Where an endpoint stands.  Only READY and HALF_OPEN ones are offered requests.

    PAUSED: it would be ready, and an operator keeps requests from it.
    """

    LOADING = "loading"
    READY = "ready"
    EJECTED = "ejected"
    HALF_OPEN = "half-open"
    DRAINING = "draining"
    PAUSED = "paused"


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model or adapter that an endpoint serves, as its `/v1/models` says.

    parent: the base model of an adapter, "" for a base model.  root: the weights' own name or path.
    max_model_len: context limit in tokens, 0 when unknown.
    """

    id: str
    parent: str = ""
    root: str = ""
    max_model_len: int = 0


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's address.

    id: unique in the pool; the address unless the operator named it.  address: `ip:port` literal
    (`[v6]:port` for IPv6), as Envoy dials it.  engine: `vllm`, `sglang`, `trtllm-serve` or `shoal`; decides the
    names of its metrics.  labels: as in llm-d's endpoint files (`llm-d.ai/role`, ...).
    is_tls: whether it is dialled with TLS.  kv_sources: where it publishes what its cache holds, none when it does not.
    """

    id: str
    address: str
    engine: str = "vllm"
    labels: dict[str, str] = {}
    is_tls: bool = False
    kv_sources: tuple[KvSource, ...] = ()
