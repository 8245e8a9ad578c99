"""A random model of transformers and ours with the same weights; logits and every gradient compared.

transformers keeps a layer's experts stacked in memory and one by one in files; names here are those of files.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from titan5d.models.args import ModelArgs, count_parameters
from titan5d.models.decoder import Decoder
from titan5d.models.hf_names import from_hf, to_hf


def built(family: ModuleType, args: ModelArgs) -> Any:
    """The model that transformers builds from our `config.json`."""
    fields = family.to_hf_config(args)
    name = fields.pop("architectures")[0]
    config_class = getattr(transformers, name.replace("ForCausalLM", "Config"))
    fields |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    return getattr(transformers, name)(config_class(**fields))


def theirs(family: ModuleType, args: ModelArgs) -> Any:
    """Random weights, norms and selection biases included, so that none can be left out unseen."""
    model = built(family, args)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
        if parameter.ndim == 2 and parameter.shape[0] == args.n_experts:  # routers with an opinion
            parameter.data.mul_(10)
    for bias_name, buffer in model.named_buffers():
        if bias_name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn_like(buffer))
    return model


def as_files(model: Any, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers (or the parameters' gradients) as they stand in the files of a checkpoint."""
    tensors = {
        name: parameter.grad if gradients else parameter for name, parameter in model.named_parameters()
    }
    if not gradients:
        tensors |= {
            name: one for name, one in model.named_buffers() if name.endswith("e_score_correction_bias")
        }
    mixtral = model.config.model_type == "mixtral"
    gate, down, up = ("w1", "w2", "w3") if mixtral else ("gate_proj", "down_proj", "up_proj")
    files = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        where = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        stem, _, last = where.rpartition(".")
        if last == "gate_up_proj":
            for n, both in enumerate(tensor):
                files[f"{stem}.{n}.{gate}.weight"], files[f"{stem}.{n}.{up}.weight"] = both.chunk(2)
        elif last == "down_proj":
            files |= {f"{stem}.{n}.{down}.weight": one for n, one in enumerate(tensor)}
        else:
            files[where] = tensor
    return files


def ours(family: ModuleType, args: ModelArgs, hf_model: Any) -> Decoder:
    """Our model with the other's weights."""
    model = Decoder(args)
    missing, unexpected = model.load_state_dict(
        from_hf(family.hf_name_map(args), as_files(hf_model)), strict=False
    )
    assert unexpected == []
    # what Hugging Face has no name for: a tied head, the load counted by a router, the bias of one without
    for name in missing:
        assert name.endswith((".router.load", ".router.bias")) or (
            args.tie_embeddings and name == "output.weight"
        )
    return model.eval()


def assert_equal(family: ModuleType, args: ModelArgs, tolerance: float = 1e-5) -> None:
    """Logits, and every gradient of a cross-entropy, within `tolerance` of the largest element."""
    hf_model = theirs(family, args)
    model = ours(family, args, hf_model)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(args.vocab_size, (2, 48), generator=generator) for _ in range(2))
    expected = hf_model(tokens).logits
    logits = model(tokens)
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    model(tokens, labels=labels)[0].backward()
    names = family.hf_name_map(args)
    parameters = dict(model.named_parameters())
    constant_weights = args.top_k == 1 and args.router_normalize
    wanted = from_hf({name: names[name] for name in parameters}, as_files(hf_model, gradients=True))
    assert len(wanted) == len(parameters) >= 9 * args.n_layers
    for name, gradient in wanted.items():
        found = parameters[name].grad
        assert found is not None and gradient.abs().max() > 0, name
        scale = gradient.abs().max()
        if constant_weights and name.endswith(
            "router.weight"
        ):  # one expert of weight 1: what is left is rounding
            scale = wanted[name.replace("router.weight", "experts.w1")].abs().max()
        error = (found - gradient).abs().max() / scale
        assert error <= tolerance, f"{name}: {error:.1e}"


def assert_published_count(family: ModuleType, flavor: str, total: int, active: int) -> None:
    """Our formula, our model and transformers' model have exactly `total` parameters."""
    args = family.FLAVORS[flavor]
    count = count_parameters(args)
    assert (count.total, count.active) == (total, active)
    assert args.problems() == []
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in built(family, args).parameters()) == total
        assert sum(parameter.numel() for parameter in Decoder(args).parameters()) == total


def assert_config_there_and_back(family: ModuleType, args: ModelArgs) -> None:
    """Also through transformers, which writes newer fields (rope_parameters) and its own defaults."""
    emitted = family.to_hf_config(args)
    assert family.from_hf_config(emitted) == args
    name = emitted["architectures"][0].replace("ForCausalLM", "Config")
    written = getattr(transformers, name)(**emitted).to_dict()
    assert "rope_scaling" not in written and family.from_hf_config(written) == args


def assert_files_are_read_and_written(family: ModuleType, args: ModelArgs, folder: Path) -> None:
    """Tensors that transformers saves: ours has a place for each, and gives each back bit by bit."""
    hf_model = theirs(family, args)
    hf_model.save_pretrained(folder)
    files: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        files |= load_file(file)
    model, names = Decoder(args), family.hf_name_map(args)
    model.load_state_dict(from_hf(names, files), strict=False)
    again = to_hf(names, model.state_dict())
    assert again.keys() == files.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in files.items())
    assert files.keys() == as_files(hf_model).keys()  # so that the names in this module are those of files
