"""Which models and adapters this engine serves, as /v1/models tells it."""

import msgspec

from shoal.hosts.engine.errors import ApiError, not_found


class Catalog:
    """Served names (the first is the base model, the rest its aliases) and loaded adapters by name.

    An adapter that is loaded again under its name is another one: no cached block of the old one fits it.
    """

    __slots__ = ("_created", "_max_model_len", "_numbers", "_versions", "adapters", "names", "root")

    def __init__(
        self, names: tuple[str, ...], adapters: tuple[str, ...], root: str, max_model_len: int, now: float
    ) -> None:
        self.names = names
        self.adapters: dict[str, str] = {name: f"/adapters/{name}" for name in adapters}
        self._numbers = {name: number for number, name in enumerate(adapters, 1)}
        self._versions = dict.fromkeys(adapters, 1)
        self.root = root
        self._max_model_len = max_model_len
        self._created = int(now)

    @property
    def base(self) -> str:
        """The name that answers of the base model carry."""
        return self.names[0]

    def resolve(self, model: str | None) -> tuple[str, str]:
        """Return (name for the answer, adapter or "").  Raises ApiError 404 for a model that is not served."""
        if not model or model in self.names:
            return self.base, ""
        if model in self.adapters:
            return model, model
        raise not_found(model, [*self.names, *self.adapters])

    def identity(self, adapter: str) -> str:
        """Return what tells the content of an adapter from all others, "" for the base model."""
        return f"{adapter}@{self._versions.get(adapter, 0)}" if adapter else ""

    def lora_id(self, adapter: str) -> int:
        """Return the number of an adapter's name, from 1 on; it stays when the adapter is loaded again."""
        return self._numbers.setdefault(adapter, len(self._numbers) + 1)

    def load(self, name: str, path: str, *, is_in_place: bool = False) -> str:
        """Add an adapter, or with `is_in_place` put it in the place of one with its name.

        Returns vLLM's line of success.  Raises ApiError 400 when it is there already.
        """
        if not name or not path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name in self.adapters and not is_in_place:
            message = f"The lora adapter '{name}' has already been loaded."
            raise ApiError(400, message, "InvalidUserInput", "lora_name")
        self.adapters[name] = path
        self._versions[name] = self._versions.get(name, 0) + 1
        self.lora_id(name)
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> str:
        """Remove an adapter; returns vLLM's line of success.  Raises ApiError 404 when it is not there."""
        if name not in self.adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError", "lora_name")
        del self.adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    def listing(self) -> bytes:
        """Return the body of GET /v1/models."""
        cards = [self._card(name, self.root, None, self._max_model_len) for name in self.names]
        cards += [self._card(name, path, self.base, None) for name, path in self.adapters.items()]
        return msgspec.json.encode({"object": "list", "data": cards})

    def _card(self, name: str, root: str, parent: str | None, limit: int | None) -> dict[str, object]:
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": self._created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "shoal",
            "root": root,
            "parent": parent,
            "max_model_len": limit,
            "permission": [permission],
        }
