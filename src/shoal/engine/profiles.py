"""Model and hardware as the coefficients of the step-time model, by name.

Owns how a profile follows from a model and an accelerator; their figures are in `catalog`, the formula is in
`steptime`.  A name is an accelerator, a model and, where it is not the smallest that fits, how many chips: `h200-70b`,
`h200-70b-tp8`.
"""

import re

import msgspec

from shoal.engine.catalog import ACCELERATORS, EXPERT_LAYER_S, MODELS, Accelerator, Model

_MEMORY_RATIO = 0.9
"""Share of the memory that an engine takes; vLLM's default for years."""
_ACTIVATION_BYTES = 3e9
"""Of that, kept for activations on each chip; about what vLLM measures for 8,192 tokens a step."""
_LEAST_CACHE_RATIO = 0.1
"""Share of the memory that must stay for KV blocks; fewer chips do not fit the model."""
TRANSFER_BYTES_PER_S = 12.5e9
"""A link of 100 Gbit/s: what a profile has that says nothing of its own."""
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_CHIPS = re.compile(r"-tp([1-9][0-9]?)$")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one model on one accelerator (or a tensor-parallel group, summed)."""

    name: str
    flops_per_token: float
    """Floating point operations of a forward pass for one token, attention not included."""
    flops_per_pair: float
    """Attention operations for one token looking at one token of context."""
    peak_flops_per_s: float
    """Peak of all chips together."""
    flops_ratio: float
    """Share of the peak that is reached (MFU), 0 to 1."""
    weight_bytes: float
    """Read once a step, however many sequences run; of a mixture of experts without the routed ones."""
    expert_bytes: float = 0.0
    """All routed experts; a step reads those that its tokens go to."""
    expert_ratio: float = 0.0
    """Share of them that one token goes to."""
    kv_bytes_per_token: float
    """Read once a step for each token of context of each sequence."""
    peak_bytes_per_s: float
    """Memory bandwidth of all chips together."""
    bytes_ratio: float
    """Share of the bandwidth that is reached, 0 to 1."""
    stored_bytes_per_token: float = 0.0
    """KV bytes of a token as it lies in a host tier; 0 for `kv_bytes_per_token`."""
    overhead_s: float
    """Fixed cost of a step."""
    sequence_s: float
    """Further cost of a step for each sequence in it (sampling, bookkeeping)."""
    request_s: float = 0.0
    """From the arrival of a request to its place in the queue (HTTP, templates, tokens); only the twin waits for it, as
    an embedded engine takes the time that it takes."""
    transfer_bytes_per_s: float = TRANSFER_BYTES_PER_S
    """How fast KV goes to another engine, over the network links of all chips together."""
    num_blocks: int
    """KV blocks by default."""
    block_size: int = 16
    """Tokens a KV block; 16 is vLLM's default on GPUs."""
    max_num_seqs: int = 256
    """Sequences in one step; vLLM's default was 256 for years."""
    max_num_batched_tokens: int = 8192
    """Token budget of one step; vLLM's default for serving on H100-class memory."""
    max_model_len: int = 131072
    """Context limit in tokens; an engine lowers it to what its KV cache holds."""


TINY = Profile(
    name="tiny",
    flops_per_token=1e9,
    flops_per_pair=0.0,
    peak_flops_per_s=1e13,
    flops_ratio=1.0,
    weight_bytes=3e9,
    kv_bytes_per_token=0.0,
    stored_bytes_per_token=131072,
    peak_bytes_per_s=1e12,
    bytes_ratio=1.0,
    overhead_s=0.0008,
    sequence_s=0.0002,
    num_blocks=1600,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    max_model_len=32768,
)
"""No real hardware: made so that four of them show a pool's behaviour in real time on a laptop.

Prefill about 10,000 tokens/s, a decode step of 4 ms that grows by 5 % a further sequence, and a cache of 25,600
tokens, small enough to overflow in seconds.  The small token budget keeps a long prefill from stopping others.
"""


def profile_of(model: Model, accelerator: Accelerator, chips: int = 0, *, name: str = "") -> Profile:
    """Return the profile of a model on a tensor-parallel group of `chips`, 0 for the smallest power of two that fits.

    Raises ValueError when it does not fit.
    """
    weights = model.parameters * _weight_bytes(model, accelerator)
    cache = 0.0
    for count in (chips,) if chips else _SIZES:
        memory = count * accelerator.memory_bytes
        cache = _MEMORY_RATIO * memory - weights - count * _ACTIVATION_BYTES
        if cache >= (_LEAST_CACHE_RATIO * memory if not chips else model.kv_bytes_per_token * 4096):
            return _profile(model, accelerator, count, cache, name)
    raise ValueError(f"{model.name} and a KV cache do not fit the memory of {chips or _SIZES[-1]} {accelerator.name}")


def _profile(model: Model, accelerator: Accelerator, chips: int, cache: float, name: str) -> Profile:
    is_alone = chips == 1
    is_fp8 = model.is_fp8 and accelerator.fp8_flops_per_s > 0
    per_parameter = _weight_bytes(model, accelerator)
    layer_s = accelerator.layer_s + (0.0 if is_alone else accelerator.all_reduce_s)
    blocks = round(cache / model.kv_bytes_per_token / 16, -2)
    return Profile(
        name=name or f"{accelerator.name}-{model.name}-tp{chips}",
        flops_per_token=2 * model.active_parameters,
        flops_per_pair=model.flops_per_pair,
        peak_flops_per_s=chips * (accelerator.fp8_flops_per_s if is_fp8 else accelerator.bf16_flops_per_s),
        flops_ratio=0.45 if is_alone else 0.40,
        weight_bytes=(model.parameters - model.expert_parameters) * per_parameter,
        expert_bytes=model.expert_parameters * per_parameter,
        expert_ratio=model.expert_ratio,
        kv_bytes_per_token=model.kv_bytes_per_token,
        peak_bytes_per_s=chips * accelerator.bytes_per_s,
        bytes_ratio=0.8 if is_alone else 0.75,
        overhead_s=model.layers * layer_s + model.expert_layers * EXPERT_LAYER_S,
        sequence_s=5e-6,
        transfer_bytes_per_s=chips * accelerator.link_bytes_per_s,
        num_blocks=int(blocks),
    )


def _weight_bytes(model: Model, accelerator: Accelerator) -> int:
    """Bytes of a parameter: FP8 models are computed in BF16 where the hardware has no FP8."""
    return 1 if model.is_fp8 and accelerator.fp8_flops_per_s else 2


def find_profile(name: str | Profile) -> Profile:
    """Return the profile of a name, or the one that is given.

    Raises ValueError that says what there is, or why it cannot be.
    """
    if isinstance(name, Profile):
        return name
    known = PROFILES.get(name)
    if known is not None:
        return known
    chips = _CHIPS.search(name)
    if chips is not None:
        for accelerator in ACCELERATORS:
            for model in MODELS:
                if name[: chips.start()] == f"{accelerator.name}-{model.name}":
                    return profile_of(model, accelerator, int(chips[1]), name=name)
    raise ValueError(
        f"unknown profile {name!r}; known: {', '.join(PROFILES)}, each but {TINY.name} also with -tpN for N chips"
    )


def _catalogue() -> dict[str, Profile]:
    """Return all pairs of model and accelerator of which one group holds the model."""
    profiles = {TINY.name: TINY}
    for accelerator in ACCELERATORS:
        for model in MODELS:
            name = f"{accelerator.name}-{model.name}"
            try:
                profiles[name] = profile_of(model, accelerator, name=name)
            except ValueError:
                continue
    return profiles


PROFILES = _catalogue()
"""Every profile by its name, each model on as few chips as hold it."""
