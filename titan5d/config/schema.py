"""Every key of a run, one dataclass per TOML section; the docstring under a field is its --help.

The sections fall into two halves. *What is learned*: model, moe, training (data, batch, seed), optimizer,
lr_scheduler.
*How it is executed*: parallelism, activation_checkpoint, compile, quantize, comm, ... Changing the second half must
not change the loss curve beyond rounding.

Names and defaults follow TorchTitan's TOML where it has the key. Rules that involve more than one key are in
check.py, never here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from titan5d.config.schema_execution import (
    ActivationCheckpoint,
    Comm,
    Compile,
    Debug,
    Experimental,
    FaultTolerance,
    MemoryEstimation,
    Parallelism,
    Profiling,
    Quantize,
)
from titan5d.config.section import Section


@dataclass
class Job(Section):
    """The run as a whole and its folder."""

    config_file: str | None = None
    """Set by --config; recorded in the resolved config."""
    dump_folder: str = "./outputs"
    """The run folder: config.toml, metrics.jsonl, tb/, checkpoint/, traces."""
    description: str = "default job"
    """A line for people, printed at the start."""
    print_config: bool = False
    """Print the resolved config at the start."""
    max_minutes: float = 0.0
    """End after the step during which the run has taken this long, as a signal would; 0 = no limit."""
    save_config_file: str | None = "config.toml"
    """Name of the resolved config inside the run folder; an empty string saves none."""
    custom_config_module: str = ""
    """TorchTitan's hook for extra config classes. Not offered: every key is in this file."""


@dataclass
class Metrics(Section):
    """What is logged, how often and where."""

    log_freq: int = 10
    """Log every this many optimizer steps; the first and the last step are always logged."""
    enable_tensorboard: bool = True
    """Write TensorBoard events."""
    disable_color_printing: bool = False
    """Plain console lines. Colours are also off when the output is no terminal."""
    save_tb_folder: str = "tb"
    """TensorBoard folder inside the run folder."""
    save_for_all_ranks: bool = False
    """TorchTitan lets every rank write its own metrics. Not offered: one writer holds the true global values."""
    enable_wandb: bool = False
    """Also log to Weights & Biases (needs the [wandb] extra)."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for MFU. Default: the device table, else a short measured calibration."""


@dataclass
class Model(Section):
    """Which model is trained. Dimensions left out take the flavor's value."""

    name: str = "llama3"
    """Model family: llama3, qwen3, mixtral, deepseek_v3."""
    flavor: str = "debug"
    """Size within the family. llama3: debug, 1B, 3B, 8B, 70B, 405B; qwen3: debug, 0.6B, 1.7B, 4B, 8B, 14B, 32B,
    debug_moe, 30B-A3B, 235B-A22B; mixtral: debug, 8x7B, 8x22B; deepseek_v3: debug, 16B, 671B."""
    tokenizer_path: str = "bpe4k"
    """`bpe4k` (ours, 4,096 tokens), `bytes`, a tokenizer.json, or a folder that holds one."""
    hf_assets_path: str | None = None
    """TorchTitan's name for the folder with the tokenizer; used when tokenizer_path is not set."""
    converters: list[str] = field(default_factory=list)
    """Products in 8 bits (docs/precision.md): ["quantize.linear.float8"] or ["quantize.linear.mx"]; short: "float8"."""
    attention_backend: Literal[
        "auto", "sdpa", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flash_attn"
    ] = "auto"
    """Kernels of attention (docs/attention.md): torch's choice, one of torch's, or the flash-attn package, which skips
    pairs of different documents. auto = flash_attn where it is installed and can run, else sdpa."""
    print_after_conversion: bool = False
    """Print the model after it has been cut."""
    dim: int | None = None
    """Width of the residual stream."""
    n_layers: int | None = None
    """Number of blocks."""
    n_heads: int | None = None
    """Number of query heads."""
    n_kv_heads: int | None = None
    """Number of key/value heads; divides n_heads."""
    head_dim: int | None = None
    """Width of one head; dim / n_heads unless set."""
    ffn_dim: int | None = None
    """Hidden width of the feed-forward."""
    vocab_size: int | None = None
    """Rows of the embedding and the head."""
    norm_eps: float | None = None
    """Epsilon of RMSNorm."""
    rope_theta: float | None = None
    """Base of the rotary frequencies."""
    tie_embeddings: bool | None = None
    """Share one matrix between embedding and head."""
    max_seq_len: int | None = None
    """Longest context the model is made for, written into exported configs; it bounds nothing here."""
    qk_norm: bool | None = None
    """Normalise each query and key head."""
    n_experts: int | None = None
    """Routed experts of a layer; 0 = one feed-forward for all tokens."""
    top_k: int | None = None
    """Experts each token is sent to."""
    moe_ffn_dim: int | None = None
    """Hidden width of one expert."""
    n_shared_experts: int | None = None
    """Experts that every token meets besides."""
    n_dense_layers: int | None = None
    """Leading layers without experts."""
    router_score: Literal["softmax", "sigmoid"] | None = None
    """How the router's logits become scores."""
    router_normalize: bool | None = None
    """Divide the scores of a token's experts by their sum."""
    router_scale: float | None = None
    """Factor on them after that."""
    n_expert_groups: int | None = None
    """Equal groups (nodes) the experts lie in."""
    n_limited_groups: int | None = None
    """Groups whose experts one token may use."""
    kv_lora_rank: int | None = None
    """Latent attention: width of the vector from which keys and values are made; 0 = ordinary attention."""
    q_lora_rank: int | None = None
    """Latent attention: the same for queries; 0 = straight from the residual stream."""
    qk_nope_head_dim: int | None = None
    """Latent attention: elements of a query head that are not rotated."""
    qk_rope_head_dim: int | None = None
    """Latent attention: elements of a query head that are rotated."""
    v_head_dim: int | None = None
    """Latent attention: width of a value head."""


@dataclass
class MixtureOfExperts(Section):
    """How the load of experts is kept even (docs/experts.md). Only for a model with experts."""

    aux_loss_coefficient: float = 0.0
    """Weight of the load-balancing loss; 0 = none. It trains, and is not part of the logged loss."""
    aux_loss_kind: Literal["sequence", "micro_batch", "global_batch"] = "sequence"
    """Over which tokens an expert's load is counted: a row, a micro-batch (then local_batch_size is part of what is
    learned), or the global batch of the step before."""
    z_loss_coefficient: float = 0.0
    """Weight of the mean squared log-sum-exp of the router's logits; 0 = none."""
    bias_update_rate: float = 0.0
    """After each step an expert's selection bias moves by this, up if it got less than its share, else down; 0 = not.
    DeepSeek-V3: 0.001."""
    capacity_factor: float = 0.0
    """An expert takes at most this multiple of its even share of each row, later tokens are dropped; 0 = no limit."""
    score_before_w2: bool = False
    """Weigh an expert's hidden vector instead of its output: the same value, and the outputs (dim wide) need not be
    kept for backward."""


@dataclass
class Optimizer(Section):
    """The update rule."""

    name: Literal["AdamW", "Adam", "SGD", "Muon"] = "AdamW"
    """AdamW, Adam, SGD, or Muon (hidden matrices by Muon, everything else by AdamW)."""
    lr: float = 8e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay on matrices; norms and biases are never decayed."""
    momentum: float = 0.0
    """Momentum of SGD; Muon's momentum when not zero, else 0.95."""
    state_dtype: Literal["float32", "int8", "float8", "int4"] = "float32"
    """AdamW and Adam: how the moments are kept. int8, float8 (a byte a value) and int4 have one scale for each block of
    256 (int4: 128) values (Dettmers et al. 2022); through torchao, the [ao] extra. Default: as the weights."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Which of torch's implementations runs the update."""
    early_step_in_backward: bool = False
    """Step inside backward. Not offered: it cannot clip by a global norm."""


@dataclass
class LRScheduler(Section):
    """Warmup, stable, decay."""

    warmup_steps: int = 200
    """Steps of linear warmup."""
    total_steps: int | None = None
    """Length of the schedule; training.steps unless set."""
    decay_ratio: float | None = None
    """Share of the steps that decay at the end (WSD). Default: decay begins right after warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = 0.0
    """The decay ends at this share of the peak."""


@dataclass
class DataLoader(Section):
    """How batches are read ahead."""

    num_workers: int = 0
    """TorchTitan's worker processes. Not needed: one prefetch thread reads 20 M tokens/s. Only 0."""
    persistent_workers: bool = False
    """Belongs to num_workers. Only false."""
    pin_memory: bool = False
    """Page-locked batches, for CUDA."""
    prefetch_factor: int | None = None
    """Optimizer steps read ahead; default 2."""


@dataclass
class Training(Section):
    """Data, batch, length and numerics."""

    dataset: str = "pysrc"
    """pysrc, text, jsonl, parquet, shards, tokens, or a weighted blend (docs/data.md)."""
    dataset_path: str | None = None
    """File, folder or glob of the data set."""
    cache_folder: str | None = None
    """Where tokenized text is kept; default ~/.cache/titan5d/data."""
    local_batch_size: int = 8
    """Rows per micro-batch on one data-parallel rank."""
    global_batch_size: int = -1
    """Rows per optimizer step over all ranks; -1 = local_batch_size x data-parallel ranks (no accumulation)."""
    seq_len: int = 2048
    """Tokens per row."""
    steps: int = 10000
    """Optimizer steps."""
    epochs: int = 0
    """End after this many passes over the data even if steps are left; 0 = repeat for ever."""
    shuffle: bool = True
    """Visit the samples in an order drawn anew each epoch."""
    document_mask: bool = True
    """Attention stays inside each document of a packed row."""
    max_norm: float = 1.0
    """Clip the global gradient norm to this; 0 or inf = never."""
    max_skipped_steps: int = 10
    """Stop after this many steps in a row whose gradient was not finite (each such step is skipped and counted)."""
    seed: int = 0
    """Seed of weights and data order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto = CUDA when there is one."""
    enable_cpu_offload: bool = False
    """Keep sharded parameters and optimizer state in CPU memory."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Storage type of parameters, gradients and optimizer state."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which parameters are gathered and the model computes."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are summed over ranks."""
    loss_chunk_mib: float = 64.0
    """Largest piece of the logits held at once; changes memory only, never the value. 0 = all at once."""
    gc_freq: int = 50
    """Collect Python garbage every this many steps, on all ranks at once; 0 = leave Python's own timing."""
    gc_debug: bool = False
    """Log what garbage collection found."""
    dataloader: DataLoader = field(default_factory=DataLoader)
    """Reading ahead."""


@dataclass
class Validation(Section):
    """Loss on held-out data, without touching the training state."""

    enable: bool = False
    """Validate every `freq` steps and at the end."""
    dataset: str = "pysrc"
    """Data set to validate on; pysrc has a held-out part."""
    dataset_path: str | None = None
    """File, folder or glob of the data set."""
    local_batch_size: int = 8
    """Rows per micro-batch on one data-parallel rank."""
    seq_len: int = 2048
    """Tokens per row."""
    freq: int = 100
    """Validate every this many optimizer steps."""
    steps: int = -1
    """Batches of each data-parallel rank per round (more ranks: more rows), the same in every round; -1 = the whole
    data set once, in any layout the same."""
    dataloader: DataLoader = field(default_factory=DataLoader)
    """Reading ahead."""


@dataclass
class Checkpoint(Section):
    """Saving and continuing."""

    enable: bool = False
    """Save checkpoints and continue from the newest complete one."""
    enable_ft_dataloader_checkpoints: bool = True
    """TorchTitan's torchft option. No effect without fault_tolerance.enable, which is refused."""
    folder: str = "checkpoint"
    """Folder inside the run folder."""
    interval: int = 500
    """Save every this many steps."""
    initial_load_path: str | None = None
    """Start from this checkpoint when the run folder has none."""
    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path."""
    initial_load_in_hf: bool = False
    """initial_load_path holds Hugging Face safetensors."""
    initial_load_in_hf_quantized: bool = False
    """The Hugging Face weights are quantized."""
    last_save_model_only: bool = True
    """The last save holds only the weights."""
    last_save_in_hf: bool = False
    """The last save is written in Hugging Face format."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights in a last save that is model-only."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write while training goes on."""
    keep_latest_k: int = 10
    """Complete checkpoints to keep; 0 = all."""
    load_step: int = -1
    """Step to continue from; -1 = the newest complete one."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """Parts not to load: "model", "optimizer", "dataloader" (its position), "generators" (random numbers)."""
    enable_first_step_checkpoint: bool = False
    """Also save after step 1."""
    create_seed_checkpoint: bool = False
    """Save the initial weights and end."""
    load_only: bool = False
    """Load but never save."""


@dataclass
class Config(Section):
    """One run."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    moe: MixtureOfExperts = field(default_factory=MixtureOfExperts)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    validation: Validation = field(default_factory=Validation)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    quantize: Quantize = field(default_factory=Quantize)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    memory_estimation: MemoryEstimation = field(default_factory=MemoryEstimation)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    experimental: Experimental = field(default_factory=Experimental)
