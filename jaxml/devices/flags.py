"""XLA flags, by backend, that let communication between devices overlap with computation: data to be read, never applied.

Reads no other jaxml file; `jaxml inspect --flags` shows it. No jax. XLA reads its flags once, when a process first asks for
devices, and ends the process at one that it does not know: so they belong in the environment of a job, where they can be
seen. The names change between releases of jaxlib; `tests/devices/test_flags.py` starts the one at hand with them. Sources:
https://docs.jax.dev/en/latest/gpu_performance_tips.html and https://docs.jax.dev/en/latest/xla_flags.html.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """One flag, without its dashes, and in one line what it is good for."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


@dataclass(frozen=True)
class Preset:
    """The flags of a backend. `variable`: the environment variable that is read for them; `checked`: how far they were
    tried."""

    variable: str
    flags: tuple[Flag, ...]
    checked: str

    @property
    def line(self) -> str:
        """To paste into a shell or a job script.

        >>> PRESETS["cpu"].line
        'export XLA_FLAGS="--xla_cpu_enable_concurrency_optimized_scheduler=true"'
        """
        return f'export {self.variable}="{" ".join(map(str, self.flags))}"'


# Bytes that are sent as one collective: larger ones use the links better, and overlap less with what comes before them.
COMBINED_BYTES = 128 * 2**20

PRESETS: dict[str, Preset] = {
    "gpu": Preset(
        "XLA_FLAGS",
        (
            Flag("xla_gpu_enable_latency_hiding_scheduler", "true", "starts collectives early and waits for them late"),
            Flag("xla_gpu_enable_highest_priority_async_stream", "true", "collectives do not queue behind computation"),
            Flag(
                "xla_gpu_enable_pipelined_all_gather", "true", "fsdp: the next layer's weights arrive during this layer"
            ),
            Flag("xla_gpu_enable_pipelined_reduce_scatter", "true", "fsdp: gradients leave during the layer before"),
            Flag("xla_gpu_enable_pipelined_all_reduce", "true", "data: the same for gradients that are not split"),
            Flag(
                "xla_gpu_enable_while_loop_double_buffering", "true", "scanned layers: overlap over the loop's border"
            ),
            Flag("xla_gpu_all_gather_combine_threshold_bytes", str(COMBINED_BYTES), "fewer, larger messages"),
            Flag("xla_gpu_reduce_scatter_combine_threshold_bytes", str(COMBINED_BYTES), "fewer, larger messages"),
            Flag("xla_gpu_all_reduce_combine_threshold_bytes", str(COMBINED_BYTES), "fewer, larger messages"),
        ),
        "jaxlib 0.10 knows the names; the gain was not measured on GPUs",
    ),
    "tpu": Preset(
        "LIBTPU_INIT_ARGS",
        (
            Flag("xla_enable_async_all_gather", "true", "fsdp: weights are gathered during computation"),
            Flag("xla_tpu_enable_async_collective_fusion", "true", "collectives run inside fusions of other work"),
            Flag("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true", "the same for gathers of weights"),
            Flag(
                "xla_tpu_enable_async_collective_fusion_multiple_steps", "true", "one collective spans several fusions"
            ),
            Flag("xla_tpu_overlap_compute_collective_tc", "true", "products and collectives at once on one core"),
            Flag(
                "xla_tpu_enable_data_parallel_all_reduce_opt",
                "true",
                "data: gradients are reduced during the backward pass",
            ),
            Flag("xla_tpu_data_parallel_opt_different_sized_ops", "true", "the same where layers differ in size"),
        ),
        "not run: the names are those of public documentation, and libtpu alone reads them",
    ),
    "cpu": Preset(
        "XLA_FLAGS",
        (
            Flag(
                "xla_cpu_enable_concurrency_optimized_scheduler",
                "true",
                "independent work at once instead of in the order that needs least memory",
            ),
        ),
        "jaxlib 0.10 knows the name; the gain was not measured",
    ),
}
