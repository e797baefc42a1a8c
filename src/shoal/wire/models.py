"""Lists of models: what an engine's `/v1/models` says, and the one list that a pool shows.

Owns the OpenAI model list as vLLM, SGLang and others write it.  Which names a pool accepts (aliases, adapters) is
decided by the router.
"""

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any

import msgspec

from shoal.kernel import UNREADABLE, InvalidInput
from shoal.pool import ServedModel

MAX_NAMES = 1000
_MAX_CHARS = 100
_MAX_COMPARED = 300
_NEAR_RATIO = 0.6


class _Entry(msgspec.Struct, gc=False):
    id: Any = None
    root: Any = None
    parent: Any = None
    max_model_len: Any = None


class _List(msgspec.Struct, gc=False):
    data: list[_Entry]


_DECODER = msgspec.json.Decoder(_List)


def parse_models(body: bytes) -> tuple[ServedModel, ...]:
    """Return the models of a `/v1/models` answer, first entry of each id.

    Raises InvalidInput when it is no model list; entries without a name are passed over.
    """
    try:
        entries = _DECODER.decode(body).data
    except UNREADABLE as error:
        raise InvalidInput(f"/v1/models did not answer a model list: {error}") from None
    found: dict[str, ServedModel] = {}
    for entry in entries[:MAX_NAMES]:
        if isinstance(entry.id, str) and entry.id and entry.id not in found:
            length = entry.max_model_len
            found[entry.id] = ServedModel(
                id=entry.id,
                parent=entry.parent if isinstance(entry.parent, str) else "",
                root=entry.root if isinstance(entry.root, str) else "",
                max_model_len=length if type(length) is int and length > 0 else 0,
            )
    return tuple(found.values())


def render_models(models: Iterable[ServedModel], created: int = 0) -> bytes:
    """Return the merged OpenAI model list, sorted by name.

    An id that several endpoints serve stands once, with the largest context that any of them offers.
    """
    merged: dict[str, ServedModel] = {}
    for model in models:
        known = merged.get(model.id)
        if known is None or model.max_model_len > known.max_model_len:
            merged[model.id] = model
    return msgspec.json.encode(
        {"object": "list", "data": [_listed(model, created) for _, model in sorted(merged.items())]}
    )


def render_model(model: ServedModel, created: int = 0) -> bytes:
    """Return the body of `/v1/models/{id}`."""
    return msgspec.json.encode(_listed(model, created))


def _listed(model: ServedModel, created: int) -> dict[str, object]:
    return {
        "id": model.id,
        "object": "model",
        "created": created,
        "owned_by": "shoal",
        "root": model.root or model.id,
        "parent": model.parent or None,
        "max_model_len": model.max_model_len or None,
    }


def near_names(name: str, known: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Return up to `limit` of `known` that `name` may have meant, nearest first; case and organisation are ignored."""
    wanted = _bare(name)
    if not wanted:
        return ()
    matcher = SequenceMatcher(None, "", wanted, autojunk=False)
    rough: list[tuple[bool, float, str, str]] = []
    for candidate in sorted(set(known))[:_MAX_COMPARED]:
        bare = _bare(candidate)
        matcher.set_seq1(bare)
        is_part = len(wanted) >= 3 and len(bare) >= 3 and (wanted in bare or bare in wanted)
        if is_part or matcher.real_quick_ratio() >= _NEAR_RATIO:
            rough.append((not is_part, -matcher.quick_ratio(), candidate, bare))
    near: list[tuple[bool, float, str]] = []
    # The exact ratio costs ten times the upper bound, and is taken of the most promising only.
    for is_apart, _, candidate, bare in sorted(rough)[: 4 * limit]:
        matcher.set_seq1(bare)
        ratio = matcher.ratio()
        if not is_apart or ratio >= _NEAR_RATIO:
            near.append((is_apart, -ratio, candidate))
    return tuple(candidate for _, _, candidate in sorted(near)[:limit])


def _bare(name: str) -> str:
    return name[:_MAX_CHARS].lower().rstrip("/").rpartition("/")[2]
