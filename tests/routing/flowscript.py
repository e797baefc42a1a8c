"""A scripted pool with flow control: requests are sent, wait, and their endings are counted."""

from shoal.pool import Api, Outcome, Request
from shoal.routing import Account, Arrived, Command, Ended, Forward, Recorded, Refuse, Ticked
from shoal.routing.commands import Hold
from tests.routing.script import Pool, blocks_of

LLM_D = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
POOL = "---\napiVersion: shoal.dev/v1alpha1\nkind: Pool\n"
OBJECTIVES = "".join(
    f"---\napiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {{name: {name}}}\n"
    f"spec: {{priority: {priority}}}\n"
    for name, priority in (("high", 10), ("low", -1))
)


def flow_of(
    slots: int = 2, *, flow: str = "", control: str = "", tenants: str = "", trust: bool = True, ttl: str = "60s"
) -> str:
    """A configuration whose endpoints take `slots` requests each."""
    return (
        f"{LLM_D}plugins:\n- type: concurrency-detector\n  parameters: {{maxConcurrency: {slots}}}\n"
        "- type: static-usage-limit-policy\n"
        "flowControl:\n  saturationDetector: {pluginRef: concurrency-detector}\n"
        f"  usageLimitPolicyPluginRef: static-usage-limit-policy\n  defaultRequestTTL: {ttl}\n{control}"
        f"{POOL}flow: {{enabled: true, trust_headers: {str(trust).lower()}{flow}}}\n{tenants}{OBJECTIVES}"
    )


class FlowPool(Pool):
    """Every command is kept by the request it is about."""

    def __init__(self, config: str = "", endpoints: int = 1, **fields: object) -> None:
        self.told: dict[str, list[Command]] = {}
        super().__init__(endpoints, config=config or flow_of(), **fields)  # type: ignore[arg-type]

    def feed(self, event: object) -> list[Command]:
        commands = super().feed(event)
        for command in commands:
            self.told.setdefault(command.request_id, []).append(command)
        return commands

    def ask(self, name: str, tenant: str = "", objective: str = "", tokens: int = 640, **fields: object) -> str:
        """Send a request and return what the router says at once.  prompt: equal ones are equal, its own by default."""
        prompt = str(fields.pop("prompt", name))
        request = Request(
            id=name,
            api=Api.CHAT,
            model=str(fields.pop("model", "m")),
            is_streaming=bool(fields.pop("is_streaming", True)),
            prompt_tokens=tokens,
            prompt_bytes=4 * tokens,
            body_bytes=4 * tokens,
            tenant_id=tenant,
            objective=objective,
            **fields,  # type: ignore[arg-type]
        )
        self.feed(Arrived(request, blocks_of(prompt, tokens)))
        return self.state(name)

    def state(self, name: str) -> str:
        """`sent`, `waits`, or why it was refused."""
        last = [each for each in self.told.get(name, []) if not isinstance(each, Account)][-1]
        if isinstance(last, Forward):
            return "sent"
        if isinstance(last, Hold):
            return "waits"
        assert isinstance(last, Refuse)
        return str(last.refusal.reason)

    def refusal(self, name: str) -> Refuse:
        last = self.told[name][-1]
        assert isinstance(last, Refuse)
        return last

    def finish(self, name: str, **fields: object) -> list[str]:
        """End a request and return which ones go then."""
        forward = next(each for each in self.told[name] if isinstance(each, Forward))
        commands = self.feed(Ended(name))
        values: dict[str, object] = {
            "status": 200,
            "served_address": forward.endpoints[0],
            "ttft_s": 0.05,
            "duration_s": 0.2,
            "prompt_tokens": 640,
            "cached_tokens": 0,
            "completion_tokens": 10,
        }
        commands = [*commands, *self.feed(Recorded(name, Outcome(**{**values, **fields})))]  # type: ignore[arg-type]
        return [each.request_id for each in commands if isinstance(each, Forward)]

    def tick(self, to: float | None = None) -> list[Command]:
        if to is not None:
            self.now = to
        return self.feed(Ticked())
