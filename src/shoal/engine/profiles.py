"""Named pairs of model and hardware, as the coefficients of the step-time model.

Owns the figures and where they come from; the formula is in `steptime`.

Sources.  FLOPs per token: 2 x parameters for the matrix products (Kaplan et al. 2020, eq. 2.2), plus
4 x layers x hidden per (query, key) pair for attention.  Weights: BF16, 2 bytes a parameter.  KV bytes per
token: 2 x layers x KV heads x head size x 2 bytes; Llama 3 8B 2*32*8*128*2 = 128 KiB, 70B 2*80*8*128*2 =
320 KiB.  H100 SXM data sheet: 989.5 TFLOP/s dense BF16, 3.35 TB/s, 80 GB.  TPU v6e (Trillium) page: 918
TFLOP/s BF16, 1.64 TB/s, 32 GB.  Share of peak reached: 0.45 of the FLOPs and 0.8 of the bandwidth on one chip,
0.40 and 0.75 under tensor parallelism; these two and the per-step overheads (launch, sampling, scheduling and,
with tensor parallelism, two all-reduces a layer) are round figures near what public vLLM benchmarks show,
not measurements of ours.  Blocks: (0.9 x memory - weights - about 3 GB of activations a chip) / KV bytes / 16.
"""

from typing import TypedDict

import msgspec


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
    """Read once a step, however many sequences run."""
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


class _Model(TypedDict):
    flops_per_token: float
    flops_per_pair: float
    weight_bytes: float
    kv_bytes_per_token: float


_LLAMA_8B = _Model(
    flops_per_token=2 * 8.03e9, flops_per_pair=4 * 32 * 4096, weight_bytes=2 * 8.03e9, kv_bytes_per_token=131072
)
_LLAMA_70B = _Model(
    flops_per_token=2 * 70.6e9, flops_per_pair=4 * 80 * 8192, weight_bytes=2 * 70.6e9, kv_bytes_per_token=327680
)

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

H100_8B = Profile(
    name="h100-8b",
    **_LLAMA_8B,
    peak_flops_per_s=989.5e12,
    flops_ratio=0.45,
    peak_bytes_per_s=3.35e12,
    bytes_ratio=0.8,
    overhead_s=0.0015,
    sequence_s=5e-6,
    num_blocks=25300,
)
"""One H100 SXM: prefill about 27,000 tokens/s, a lone decode step about 7.5 ms."""

H100_70B = Profile(
    name="h100-70b",
    **_LLAMA_70B,
    peak_flops_per_s=4 * 989.5e12,
    flops_ratio=0.40,
    peak_bytes_per_s=4 * 3.35e12,
    bytes_ratio=0.75,
    overhead_s=0.004,
    sequence_s=5e-6,
    num_blocks=25700,
)
"""Four H100 SXM, tensor parallel: prefill about 11,000 tokens/s, a lone decode step about 18 ms."""

TPU_V6E_8B = Profile(
    name="tpu-v6e-8b",
    **_LLAMA_8B,
    peak_flops_per_s=918e12,
    flops_ratio=0.45,
    peak_bytes_per_s=1.64e12,
    bytes_ratio=0.8,
    overhead_s=0.002,
    sequence_s=5e-6,
    num_blocks=4700,
)
"""One TPU v6e chip: prefill about 25,000 tokens/s, a lone decode step about 14 ms."""

TPU_V6E_70B = Profile(
    name="tpu-v6e-70b",
    **_LLAMA_70B,
    peak_flops_per_s=8 * 918e12,
    flops_ratio=0.40,
    peak_bytes_per_s=8 * 1.64e12,
    bytes_ratio=0.75,
    overhead_s=0.005,
    sequence_s=5e-6,
    num_blocks=12400,
)
"""Eight TPU v6e chips, tensor parallel: prefill about 20,000 tokens/s, a lone decode step about 19 ms."""

PROFILES: dict[str, Profile] = {profile.name: profile for profile in (TINY, H100_8B, H100_70B, TPU_V6E_8B, TPU_V6E_70B)}
"""Every profile by its name."""
