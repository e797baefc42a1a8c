"""Which endpoints serve which model name, and what an unknown name is told.

Owns aliases, base-model names and weighted rewrites.  A name is served by an endpoint when its `/v1/models` lists it;
an endpoint that lists nothing serves every name.  A name whose last endpoint has left stays known for a day: it may be
scaled to zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from shoal.pool import ServedModel
from shoal.wire import near_names

GONE_S = 86_400.0
MAX_GONE = 1_000


class RewriteTarget(Protocol):
    """One weighted target of a rewrite (`routing.config`)."""

    @property
    def model(self) -> str: ...
    @property
    def weight(self) -> int: ...


class Resolved(NamedTuple):
    """A name as the engines know it.  target: that name; is_rewritten: whether the body must say it."""

    target: str
    is_rewritten: bool


class ModelTable:
    """Model name -> ids of the endpoints that list it, with the names that stand for others."""

    __slots__ = ("_aliases", "_by_root", "_gone", "_rewrites", "_served", "_wildcards")

    def __init__(self) -> None:
        self._served: dict[str, dict[str, ServedModel]] = {}
        self._wildcards: set[str] = set()
        self._by_root: dict[str, str] = {}
        # Name -> when its last endpoint left, and its root.
        self._gone: dict[str, tuple[float, str]] = {}
        self._aliases: Mapping[str, str] = {}
        self._rewrites: Mapping[str, Sequence[RewriteTarget]] = {}

    def configure(self, aliases: Mapping[str, str], rewrites: Mapping[str, Sequence[RewriteTarget]]) -> None:
        """Take the aliases (name -> name) and rewrites (name, "" for any -> weighted targets) of a configuration."""
        self._aliases = aliases
        self._rewrites = rewrites

    def update(self, endpoint_id: str, models: Iterable[ServedModel]) -> None:
        """Take what an endpoint lists now; replaces what it listed before."""
        self.remove(endpoint_id)
        listed = list(models)
        if not listed:
            self._wildcards.add(endpoint_id)
        for model in listed:
            self._served.setdefault(model.id, {})[endpoint_id] = model
            self._gone.pop(model.id, None)
        self._reindex()

    def remove(self, endpoint_id: str) -> None:
        """Forget an endpoint."""
        self._wildcards.discard(endpoint_id)
        for name in [name for name, holders in self._served.items() if endpoint_id in holders]:
            del self._served[name][endpoint_id]
            if not self._served[name]:
                del self._served[name]
        self._reindex()

    def left(self, endpoint_id: str, now: float) -> None:
        """Forget an endpoint that is gone, but not yet the names that it alone served."""
        for name, holders in self._served.items():
            if holders.keys() == {endpoint_id}:
                model = holders[endpoint_id]
                self._gone.pop(name, None)
                self._gone[name] = (now, "" if model.parent else model.root)
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        self.remove(endpoint_id)

    def _reindex(self) -> None:
        self._by_root = {root: name for name, (_, root) in self._gone.items() if root and root not in self._served}
        taken: set[str] = set()
        for name in sorted(self._served):
            for model in self._served[name].values():
                root = "" if model.parent else model.root
                if root and root not in self._served and root not in taken:
                    taken.add(root)
                    self._by_root[root] = name

    def canonical(self, name: str) -> str:
        """The engines' own name for `name`: through aliases, then base-model roots; unknown names stay."""
        name = self._aliases.get(name, name)
        return name if name in self._served else self._by_root.get(name, name)

    def resolve(self, name: str, forced: str, chance: np.random.Generator) -> Resolved:
        """Return the engines' name for a request's model.  `forced`: a target the request insists on, or ""."""
        if not name and not forced:
            return Resolved("", False)
        target = forced or self._rewritten(name, chance)
        target = self.canonical(target)
        return Resolved(target, target != name)

    def _rewritten(self, name: str, chance: np.random.Generator) -> str:
        targets = self._rewrites.get(name) or self._rewrites.get("")
        if not targets:
            return name
        if len(targets) == 1:
            return targets[0].model
        draw = chance.random() * sum(target.weight for target in targets)
        for target in targets:
            draw -= target.weight
            if draw < 0:
                return target.model
        return targets[-1].model

    def base_at(self, endpoint_id: str) -> str:
        """The first in order of the base models that an endpoint lists: the name its KV blocks go by; "" for none."""
        found = [name for name, holders in self._served.items() if _is_base(holders.get(endpoint_id))]
        return min(found, default="")

    def is_adapter(self, name: str, endpoint_id: str) -> bool:
        """Whether `name` is an adapter there."""
        model = self._served.get(name, {}).get(endpoint_id)
        return model is not None and bool(model.parent)

    def is_served_by(self, name: str, endpoint_id: str) -> bool:
        """Whether the endpoint serves `name`; every endpoint serves the empty name."""
        return not name or endpoint_id in self._wildcards or endpoint_id in self._served.get(name, ())

    def is_known(self, name: str, now: float) -> bool:
        """Whether any endpoint lists `name`, did so of late, or might serve it unlisted."""
        if not name or name in self._served or self._wildcards or not self._served:
            return True
        return name in self._gone and now - self._gone[name][0] < GONE_S

    def max_model_len(self, name: str, endpoint_id: str) -> int:
        """Context limit of `name` there, in tokens; 0 when unknown."""
        model = self._served.get(name, {}).get(endpoint_id)
        return model.max_model_len if model else 0

    def names_at(self, endpoint_id: str) -> list[str]:
        """Sorted names that an endpoint lists."""
        return sorted(name for name, holders in self._served.items() if endpoint_id in holders)

    def near(self, name: str) -> tuple[str, ...]:
        """Names that the client may have meant."""
        return near_names(name, sorted({*self._served, *self._aliases}))

    def unknown(self, name: str) -> str:
        """What the client of an unknown model is told."""
        near = self.near(name)
        hint = f" Did you mean {', '.join(near)}?" if near else " GET /v1/models lists the models of this pool."
        return f"The model `{name[:200]}` does not exist in this pool.{hint}"

    def listed(self) -> list[ServedModel]:
        """Every model once, aliases included, sorted by name."""
        merged = {
            name: max(holders.values(), key=lambda model: model.max_model_len) for name, holders in self._served.items()
        }
        for alias in self._aliases:
            target = merged.get(self.canonical(alias))
            if target is not None and alias not in merged:
                merged[alias] = ServedModel(id=alias, root=target.id, max_model_len=target.max_model_len)
        return [merged[name] for name in sorted(merged)]


def _is_base(model: ServedModel | None) -> bool:
    return model is not None and not model.parent
