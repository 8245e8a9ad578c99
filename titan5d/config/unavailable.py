"""Keys of the field that this version does not carry out: each is refused by name with a sentence why.

A key that is in the schema either works or stands here.
"""

from __future__ import annotations

from titan5d.config.schema import Config


def unavailable(config: Config) -> list[str]:
    """One sentence for every key that asks for something that is not there."""
    par, checkpoint, training = config.parallelism, config.checkpoint, config.training
    asked: list[tuple[bool, str]] = [
        (
            config.fault_tolerance.enable,
            "fault_tolerance.enable: torchft is not used; restarts continue from checkpoints",
        ),
        (
            bool(config.fault_tolerance.semi_sync_method),
            "fault_tolerance.semi_sync_method: it would change what is learned, depending on the layout",
        ),
        (
            config.memory_estimation.enable or config.memory_estimation.disable_fake_mode,
            "memory_estimation.*: this section is TorchTitan's estimator; leave it out",
        ),
        (
            bool(config.experimental.custom_import or config.experimental.custom_args_module),
            "experimental.custom_import, custom_args_module: no code is loaded by name",
        ),
        (bool(config.job.custom_config_module), "job.custom_config_module: no code is loaded by name"),
        (config.comm.mode != "default", f"comm.mode = {config.comm.mode!r}: only 'default' trains"),
        (
            config.metrics.save_for_all_ranks,
            "metrics.save_for_all_ranks: one rank writes, with the global values",
        ),
        (
            config.optimizer.early_step_in_backward,
            "optimizer.early_step_in_backward: an update inside backward cannot be clipped by the global norm",
        ),
        (
            training.dataloader.num_workers != 0 or config.validation.dataloader.num_workers != 0,
            "training.dataloader.num_workers, validation.dataloader.num_workers: one thread reads ahead; only 0",
        ),
        (
            training.dataloader.persistent_workers or config.validation.dataloader.persistent_workers,
            "dataloader.persistent_workers: belongs to num_workers; only false",
        ),
        (
            par.expert_parallel_comm_backend == "deepep",
            "parallelism.expert_parallel_comm_backend = 'deepep': not used; only 'standard' (all-to-all)",
        ),
        (
            bool(config.quantize.grouped_mm.float8.fqns or config.quantize.grouped_mm.mx.fqns),
            "quantize.grouped_mm.*.fqns: the products of routed experts stay in the type of the model; leave it empty",
        ),
        (
            checkpoint.initial_load_in_hf_quantized,
            "checkpoint.initial_load_in_hf_quantized: quantized weights are not read; start from the unquantized model",
        ),
    ]
    return [sentence for wanted, sentence in asked if wanted]
