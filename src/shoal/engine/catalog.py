"""Models and accelerators: the published figures that profiles are made of, each with its source.

Owns the figures; what follows from them is `profiles`'.  Where a figure is not published it says so.

Models.  FLOPs per token are 2 x the parameters that it goes through (Kaplan et al. 2020, eq. 2.2), and for each (query,
key) pair 2 x heads x (size of a key + size of a value) x layers for attention.  KV bytes per token are 2 x layers x KV
heads x head size x 2 bytes, with multi-head latent attention layers x (latent + rotary part) x 2 bytes.  Layers, heads
and sizes are those of `config.json` beside the weights.

Accelerators.  Peaks are those of dense matrices on the vendor's page.  What no page says, and what is a round figure
near public benchmarks of vLLM and not a measurement of ours: the shares of the peaks that are reached (0.45 of the
FLOPs and 0.8 of the bandwidth on one chip, 0.40 and 0.75 in a group), `layer_s`, `all_reduce_s`,
`EXPERT_LAYER_S` and 5 us a sequence.  Links are those of the machine that each chip is usually sold in; a TPU's own
interconnect joins the chips of one engine, and KV between engines goes over the data centre's network.
"""

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model.  parameters: all.  active_parameters: that one token goes through.  is_fp8: as published, else BF16.

    expert_layers: layers with routed experts.  expert_parameters: of all of these.  expert_ratio: the share of them
    that one token goes to.
    """

    name: str
    layers: int
    parameters: float
    active_parameters: float
    flops_per_pair: float
    kv_bytes_per_token: float
    is_fp8: bool = False
    expert_layers: int = 0
    expert_parameters: float = 0.0
    expert_ratio: float = 0.0


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One chip.  fp8_flops_per_s: 0 where it has no FP8.  layer_s: cost of a layer beside its arithmetic (launches,
    synchronisation).  link_bytes_per_s: of its share of the host's network links.  all_reduce_s: the further cost of a
    layer in a group."""

    name: str
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    layer_s: float
    link_bytes_per_s: float
    all_reduce_s: float = 0.0


EXPERT_LAYER_S = 0.15e-3
"""Further cost of a layer with routed experts: routing, sending tokens to experts and back, small products."""

_GPU_LAYER_S = 1.5e-3 / 32
_GPU_ALL_REDUCE_S = 0.25e-3 / 80
_PCIE_ALL_REDUCE_S = 8 * _GPU_ALL_REDUCE_S
_TPU_LAYER_S = 2e-3 / 32

MODELS = (
    # Llama 3 8B: 32 layers, 32 heads of 128, 8 KV heads.
    Model(
        name="8b",
        layers=32,
        parameters=8.03e9,
        active_parameters=8.03e9,
        flops_per_pair=2 * 32 * (128 + 128) * 32,
        kv_bytes_per_token=2 * 32 * 8 * 128 * 2,
    ),
    # Llama 3 70B: 80 layers, 64 heads of 128, 8 KV heads.
    Model(
        name="70b",
        layers=80,
        parameters=70.6e9,
        active_parameters=70.6e9,
        flops_per_pair=2 * 64 * (128 + 128) * 80,
        kv_bytes_per_token=2 * 80 * 8 * 128 * 2,
    ),
    # Qwen3-235B-A22B-FP8: 94 layers, 64 heads of 128, 4 KV heads; 128 experts of 3 x 4096 x 1536, 8 a token.
    Model(
        name="qwen3-235b",
        layers=94,
        parameters=235e9,
        active_parameters=22e9,
        flops_per_pair=2 * 64 * (128 + 128) * 94,
        kv_bytes_per_token=2 * 94 * 4 * 128 * 2,
        is_fp8=True,
        expert_layers=94,
        expert_parameters=94 * 128 * 3 * 4096 * 1536,
        expert_ratio=8 / 128,
    ),
    # DeepSeek-V3: 61 layers, 128 heads with keys of 192 and values of 128, latent of 512 and rotary part of 64; in 58
    # layers 256 experts of 3 x 7168 x 2048, 8 a token.  Attention is counted as in prefill, with keys and values
    # unfolded; decoding in the latent space needs more FLOPs and is bound by bandwidth all the same.  No chip holds KV
    # of another one, as with data-parallel attention.
    Model(
        name="deepseek-v3",
        layers=61,
        parameters=671e9,
        active_parameters=37e9,
        flops_per_pair=2 * 128 * (192 + 128) * 61,
        kv_bytes_per_token=61 * (512 + 64) * 2,
        is_fp8=True,
        expert_layers=58,
        expert_parameters=58 * 256 * 3 * 7168 * 2048,
        expert_ratio=8 / 256,
    ),
)
"""Llama 3 (Grattafiori et al. 2024), Qwen3 (Yang et al. 2025), DeepSeek-V3 (2024) as their reports and configurations
say."""

ACCELERATORS = (
    # NVIDIA H100 SXM data sheet: 1,979 and 3,958 TFLOP/s with sparsity.  DGX H100: 400 Gbit/s a chip.
    Accelerator(
        name="h100",
        bf16_flops_per_s=989.5e12,
        fp8_flops_per_s=1979e12,
        bytes_per_s=3.35e12,
        memory_bytes=80e9,
        layer_s=_GPU_LAYER_S,
        link_bytes_per_s=50e9,
        all_reduce_s=_GPU_ALL_REDUCE_S,
    ),
    # NVIDIA H200 SXM data sheet: the H100 with 141 GB at 4.8 TB/s.  DGX H200: 400 Gbit/s a chip.
    Accelerator(
        name="h200",
        bf16_flops_per_s=989.5e12,
        fp8_flops_per_s=1979e12,
        bytes_per_s=4.8e12,
        memory_bytes=141e9,
        layer_s=_GPU_LAYER_S,
        link_bytes_per_s=50e9,
        all_reduce_s=_GPU_ALL_REDUCE_S,
    ),
    # NVIDIA A100 SXM 80 GB data sheet; it has no FP8.  DGX A100: 200 Gbit/s a chip.
    Accelerator(
        name="a100",
        bf16_flops_per_s=312e12,
        fp8_flops_per_s=0.0,
        bytes_per_s=2.039e12,
        memory_bytes=80e9,
        layer_s=_GPU_LAYER_S,
        link_bytes_per_s=25e9,
        all_reduce_s=_GPU_ALL_REDUCE_S,
    ),
    # NVIDIA L40S data sheet; groups are joined by PCIe.  No machine of reference: 100 Gbit/s a chip taken.
    Accelerator(
        name="l40s",
        bf16_flops_per_s=362.05e12,
        fp8_flops_per_s=733e12,
        bytes_per_s=0.864e12,
        memory_bytes=48e9,
        layer_s=_GPU_LAYER_S,
        link_bytes_per_s=12.5e9,
        all_reduce_s=_PCIE_ALL_REDUCE_S,
    ),
    # Google's page of TPU v5e: 197 TFLOP/s, 819 GB/s, 16 GB; 2 x 100 Gbit/s for 8 chips.
    Accelerator(
        name="tpu-v5e",
        bf16_flops_per_s=197e12,
        fp8_flops_per_s=0.0,
        bytes_per_s=0.819e12,
        memory_bytes=16e9,
        layer_s=_TPU_LAYER_S,
        link_bytes_per_s=3.125e9,
    ),
    # Google's page of TPU v6e (Trillium): 918 TFLOP/s, 1,640 GB/s, 32 GB; FP8 is as fast as BF16, so none; 4 x 200
    # Gbit/s for 8 chips.
    Accelerator(
        name="tpu-v6e",
        bf16_flops_per_s=918e12,
        fp8_flops_per_s=0.0,
        bytes_per_s=1.64e12,
        memory_bytes=32e9,
        layer_s=_TPU_LAYER_S,
        link_bytes_per_s=12.5e9,
    ),
    # Google's page of TPU7x (Ironwood): 2,307 and 4,614 TFLOP/s, 7,380 GB/s, 192 GiB.  Of its links to the data
    # centre's network we know no published figure: those of the v6e are taken.
    Accelerator(
        name="tpu-7x",
        bf16_flops_per_s=2307e12,
        fp8_flops_per_s=4614e12,
        bytes_per_s=7.38e12,
        memory_bytes=192 * 2**30,
        layer_s=_TPU_LAYER_S,
        link_bytes_per_s=12.5e9,
    ),
)
"""Chips by generation."""
