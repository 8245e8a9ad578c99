"""Rules for keys that hold in any layout: ranges, and keys of one section that contradict each other.

check.py calls them all; together the two files are the one place for rules.
"""

from __future__ import annotations

from titan5d.config.schema import Config


def value_problems(config: Config) -> list[str]:
    """One sentence for every value, or pair of values, that cannot work."""
    return [*_positive(config), *_schedule(config), *_switches(config), *_checkpoint(config), *_profiling(config)]


def _positive(config: Config) -> list[str]:
    training, scheduler, validation = config.training, config.lr_scheduler, config.validation
    numbers: dict[str, tuple[float, float]] = {
        "training.local_batch_size": (training.local_batch_size, 1),
        "training.seq_len": (training.seq_len, 1),
        "training.steps": (training.steps, 1),
        "training.epochs": (training.epochs, 0),
        "training.max_norm": (training.max_norm, 0),
        "training.max_skipped_steps": (training.max_skipped_steps, 0),
        "training.loss_chunk_mib": (training.loss_chunk_mib, 0),
        "training.gc_freq": (training.gc_freq, 0),
        "lr_scheduler.warmup_steps": (scheduler.warmup_steps, 0),
        "lr_scheduler.min_lr_factor": (scheduler.min_lr_factor, 0),
        "optimizer.lr": (config.optimizer.lr, 0),
        "optimizer.eps": (config.optimizer.eps, 0),
        "optimizer.weight_decay": (config.optimizer.weight_decay, 0),
        "validation.local_batch_size": (validation.local_batch_size, 1),
        "validation.seq_len": (validation.seq_len, 1),
        "validation.freq": (validation.freq, 1),
        "metrics.log_freq": (config.metrics.log_freq, 1),
        "comm.init_timeout_seconds": (config.comm.init_timeout_seconds, 1),
        "comm.train_timeout_seconds": (config.comm.train_timeout_seconds, 1),
        "comm.files_timeout_seconds": (config.comm.files_timeout_seconds, 1),
        "comm.trace_buf_size": (config.comm.trace_buf_size, 0),
    }
    problems = [
        f"{name} = {value} must be at least {least:g}"
        for name, (value, least) in numbers.items()
        if not value >= least
    ]
    if training.global_batch_size != -1 and training.global_batch_size < 1:
        problems.append(
            f"training.global_batch_size = {training.global_batch_size} must be -1 (one micro-batch) or more"
        )
    if validation.steps != -1 and validation.steps < 1:
        problems.append(f"validation.steps = {validation.steps} must be -1 (all held-out data) or at least 1")
    for name, beta in (("beta1", config.optimizer.beta1), ("beta2", config.optimizer.beta2)):
        if not 0 <= beta < 1:
            problems.append(f"optimizer.{name} = {beta} must be at least 0 and below 1")
    return problems


LOADED_PARTS = ("model", "optimizer", "dataloader", "generators")


def _checkpoint(config: Config) -> list[str]:
    ckpt, problems = config.checkpoint, []
    if ckpt.interval < 1:
        problems.append(f"checkpoint.interval = {ckpt.interval} must be at least 1")
    if ckpt.keep_latest_k < 0:
        problems.append(f"checkpoint.keep_latest_k = {ckpt.keep_latest_k} must be 0 (keep all) or more")
    if ckpt.load_step < -1:
        problems.append(f"checkpoint.load_step = {ckpt.load_step} must be -1 (the newest) or a step that was saved")
    for key in ("create_seed_checkpoint", "load_only"):
        if getattr(ckpt, key) and not ckpt.enable:
            problems.append(f"checkpoint.{key} = true needs checkpoint.enable = true")
    if ckpt.load_step >= 0 and not ckpt.enable:
        problems.append(f"checkpoint.load_step = {ckpt.load_step} needs checkpoint.enable = true")
    if ckpt.create_seed_checkpoint and ckpt.load_only:
        problems.append("checkpoint.create_seed_checkpoint = true saves, load_only = true does not; keep one")
    if ckpt.last_save_in_hf and not ckpt.last_save_model_only:
        problems.append(
            "checkpoint.last_save_in_hf = true writes weights only, but last_save_model_only = false; set it to true,"
            " or convert a checkpoint later with `titan5d convert to-hf`"
        )
    if ckpt.initial_load_in_hf and ckpt.initial_load_path is None:
        problems.append("checkpoint.initial_load_in_hf = true needs checkpoint.initial_load_path, the folder to load")
    if ckpt.initial_load_in_hf and not ckpt.initial_load_model_only:
        problems.append(
            "checkpoint.initial_load_in_hf = true brings weights only, but initial_load_model_only = false; set it to"
            " true"
        )
    problems += [
        f"checkpoint.exclude_from_loading has {part!r}; there are {', '.join(LOADED_PARTS)}"
        + (" (the learning rate follows from the step)" if part == "lr_scheduler" else "")
        for part in ckpt.exclude_from_loading
        if part not in LOADED_PARTS
    ]
    if config.job.max_minutes < 0:
        problems.append(f"job.max_minutes = {config.job.max_minutes} must be 0 (no limit) or more")
    return problems


def _profiling(config: Config) -> list[str]:
    profiling = config.profiling
    if not (profiling.enable_profiling or profiling.enable_memory_snapshot):
        return []
    warmup, active, freq = profiling.profiler_warmup, profiling.profiler_active, profiling.profile_freq
    problems = []
    if active < 1 or warmup < 0:
        problems.append(
            f"profiling.profiler_active = {active} must be at least 1, and profiler_warmup = {warmup} at least 0"
        )
    if freq < 1 or (profiling.enable_profiling and freq < warmup + active):
        problems.append(
            f"profiling.profile_freq = {freq} is shorter than one trace: profiler_warmup {warmup} + profiler_active"
            f" {active} = {warmup + active} steps; use at least that"
        )
    if profiling.enable_profiling and config.training.steps < freq:
        problems.append(
            f"profiling.profile_freq = {freq}: the first trace would be at step {freq}, and training.steps ="
            f" {config.training.steps}; use at most that"
        )
    return problems


def _schedule(config: Config) -> list[str]:
    scheduler, steps = config.lr_scheduler, config.training.steps
    total = scheduler.total_steps if scheduler.total_steps is not None else steps
    problems = []
    if total < 1:
        problems.append(f"lr_scheduler.total_steps = {total} must be at least 1")
    if total < steps and scheduler.min_lr_factor == 0:
        problems.append(
            f"lr_scheduler.total_steps = {total} ends before training.steps = {steps}, so {steps - total} steps would"
            " train at a rate of zero; set min_lr_factor above 0, or total_steps to at least training.steps"
        )
    ratio = scheduler.decay_ratio
    if ratio is not None and not 0 <= ratio <= 1:
        problems.append(f"lr_scheduler.decay_ratio = {ratio} is a share of the steps: 0 to 1")
    if scheduler.min_lr_factor > 1:
        problems.append(
            f"lr_scheduler.min_lr_factor = {scheduler.min_lr_factor} is a share of the peak: 0 to 1"
        )
    return problems


def _switches(config: Config) -> list[str]:
    problems = []
    ac, option = config.activation_checkpoint, config.activation_checkpoint.selective_ac_option
    if ac.mode == "selective" and option != "op" and not (option.isdigit() and int(option) > 0):
        problems.append(
            f"activation_checkpoint.selective_ac_option = {option!r} must be 'op' (by operator) or a number n >= 1"
            " (every n-th block)"
        )
    if ac.mode == "memory_budget" and not config.compile.enable:
        problems.append(
            "activation_checkpoint.mode = 'memory_budget' is carried out by the compiler: set compile.enable = true, or"
            " use mode = 'selective' or 'full'"
        )
    if not 0 <= ac.memory_budget <= 1:
        problems.append(
            f"activation_checkpoint.memory_budget = {ac.memory_budget} is a share of the bytes: 0 to 1"
        )
    for component in config.compile.components:
        if component not in ("model", "loss"):
            problems.append(f"compile.components has {component!r}; there are 'model' and 'loss'")
    if config.training.dtype == "bfloat16" and config.training.mixed_precision_param == "float32":
        problems.append(
            "training.mixed_precision_param = 'float32' cannot be gathered from training.dtype = 'bfloat16'; store"
            " float32, or compute in bfloat16"
        )
    return problems
