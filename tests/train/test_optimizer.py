"""Which parameter is stepped by which rule, against torch's own optimizers and closed forms, on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from titan5d.train.muon import Muon, orthogonal
from titan5d.train.optimizer import build_optimizer


@dataclass
class Section:
    name: Literal["AdamW", "Adam", "SGD", "Muon"] = "AdamW"
    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    state_dtype: Literal["float32", "int8", "float8", "int4"] = "float32"
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"


SHAPES = {
    "tok_embeddings.weight": (12, 8),
    "layers.0.attention_norm.weight": (8,),
    "layers.0.attention.wq.weight": (8, 8),
    "layers.0.attention.wq.bias": (8,),
    "layers.0.feed_forward.w1.weight": (20, 8),
    "layers.0.feed_forward.w2.weight": (8, 20),
    "layers.0.moe.experts.w1": (3, 10, 8),
    "layers.0.moe.experts.w1_bias": (3, 10),
    "norm.weight": (8,),
    "output.weight": (12, 8),
}
NOT_DECAYED = {name for name in SHAPES if "norm" in name or name.endswith("bias")}
HIDDEN = {
    "layers.0.attention.wq.weight",
    "layers.0.feed_forward.w1.weight",
    "layers.0.feed_forward.w2.weight",
    "layers.0.moe.experts.w1",
}


def parameters(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()
    }


def set_gradients(params: dict[str, Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params.values():
        param.grad = scale * torch.randn(param.shape, generator=generator)


def train(config: Section, steps: int = 3, **options: torch.dtype) -> dict[str, Tensor]:
    params = parameters()
    optimizer = build_optimizer(params.items(), config, **options)
    for step in range(steps):
        set_gradients(params, seed=1 + step)
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_norms_and_biases_do_not_decay_and_all_else_does(name: str):
    params = parameters()
    before = {key: param.detach().clone() for key, param in params.items()}
    optimizer = build_optimizer(params.items(), Section(name=name, lr=0.1, weight_decay=0.5))  # type: ignore[arg-type]
    set_gradients(params, seed=1, scale=0.0)
    optimizer.step()
    for key, param in params.items():
        expected = before[key] if key in NOT_DECAYED else before[key] * (1 - 0.1 * 0.5)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=0, msg=key)


def test_every_parameter_is_in_one_group_under_its_name():
    for name in ("AdamW", "Adam", "SGD", "Muon"):
        optimizer = build_optimizer(parameters().items(), Section(name=name))  # type: ignore[arg-type]
        names = [one for group in optimizer.param_groups for one in group["param_names"]]
        assert sorted(names) == sorted(SHAPES)
        for group in optimizer.param_groups:
            assert [tuple(param.shape) for param in group["params"]] == [
                SHAPES[one] for one in group["param_names"]
            ]


def test_frozen_parameters_are_left_alone():
    params = parameters()
    params["output.weight"].requires_grad_(False)
    optimizer = build_optimizer(params.items(), Section())
    assert "output.weight" not in [one for group in optimizer.param_groups for one in group["param_names"]]


def test_adamw_is_torchs_with_decay_by_group():
    params = parameters()
    reference = torch.optim.AdamW(
        [
            {"params": [p for n, p in params.items() if n not in NOT_DECAYED], "weight_decay": 0.1},
            {"params": [p for n, p in params.items() if n in NOT_DECAYED], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for step in range(3):
        set_gradients(params, seed=1 + step)
        reference.step()
    got = train(Section())
    assert all(torch.equal(got[name], params[name].detach()) for name in SHAPES)


def test_adam_and_adamw_take_their_first_step_as_the_closed_form_says():
    before = parameters()
    gradients = parameters()
    set_gradients(gradients, seed=1)
    weight, grad = before["output.weight"].detach(), gradients["output.weight"].grad
    assert grad is not None
    # At step 1 both moments are bias-corrected to g and g^2: the step is lr g / (|g| + eps).
    adamw = weight * (1 - 0.1 * 0.1) - 0.1 * grad / (grad.abs() + 1e-3)
    decayed = grad + 0.1 * weight
    adam = weight - 0.1 * decayed / (decayed.abs() + 1e-3)
    for name, expected in (("AdamW", adamw), ("Adam", adam)):
        got = train(Section(name=name, eps=1e-3), steps=1)["output.weight"]  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_sgd_with_rate_1_moves_by_the_gradient():
    before = {name: param.detach() for name, param in parameters().items()}
    got = train(Section(name="SGD", lr=1.0, weight_decay=0.0), steps=1)
    gradients = parameters()
    set_gradients(gradients, seed=1)
    for name in SHAPES:
        gradient = gradients[name].grad
        assert gradient is not None
        assert torch.equal(got[name], before[name] - gradient)


def test_sgd_with_momentum_follows_torch():
    params = parameters()
    reference = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    for step in range(3):
        set_gradients(params, seed=1 + step)
        reference.step()
    got = train(Section(name="SGD", momentum=0.9, weight_decay=0.0))
    for name in SHAPES:
        torch.testing.assert_close(got[name], params[name].detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Muon"])
def test_implementations_agree(name: str):
    config = Section(name=name, eps=1e-5)  # type: ignore[arg-type]
    results = {kind: train(replace(config, implementation=kind)) for kind in ("for-loop", "foreach", "fused")}
    for kind in ("foreach", "fused"):
        for param in SHAPES:
            torch.testing.assert_close(results[kind][param], results["for-loop"][param], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_the_asked_implementation_is_the_one_that_runs(implementation: str):
    for name in ("AdamW", "Adam", "SGD"):
        config = Section(name=name, implementation=implementation)  # type: ignore[arg-type]
        group = build_optimizer(parameters().items(), config).param_groups[0]
        assert (group["foreach"], group["fused"]) == (implementation == "foreach", implementation == "fused")


def test_muon_is_torchs_on_hidden_matrices_and_adamw_on_the_rest():
    params = parameters()
    matrices = [param for name, param in params.items() if name in HIDDEN and param.ndim == 2]
    rest = {name: param for name, param in params.items() if name not in HIDDEN}
    references = [
        torch.optim.Muon(matrices, lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        build_optimizer(rest.items(), Section(name="AdamW")),
    ]
    for step in range(3):
        set_gradients(params, seed=1 + step)
        for reference in references:
            reference.step()
    got = train(Section(name="Muon"))
    for name in SHAPES:
        if params[name].ndim != 3 or name in rest:
            assert torch.equal(got[name], params[name].detach()), name


def test_muon_steps_every_expert_as_a_matrix_of_its_own():
    stack = torch.nn.Parameter(torch.randn(3, 10, 8))
    singles = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    stacked = build_optimizer([("layers.0.moe.experts.w1", stack)], Section(name="Muon"))
    alone = build_optimizer(
        [(f"layers.{i}.wq.weight", one) for i, one in enumerate(singles)], Section(name="Muon")
    )
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for one, gradient in zip(singles, stack.grad, strict=True):
            one.grad = gradient.clone()
        stacked.step()
        alone.step()
    assert torch.equal(stack.detach(), torch.stack([one.detach() for one in singles]))


def test_muon_takes_momentum_from_the_config_and_0_95_without():
    def momenta(config: Section) -> set[float]:
        return {group["momentum"] for group in build_optimizer(parameters().items(), config).param_groups}

    assert momenta(Section(name="Muon")) == {0.95}
    assert momenta(Section(name="Muon", momentum=0.8)) == {0.8}


@pytest.mark.parametrize("shape", [(16, 16), (16, 40), (40, 16)])
def test_orthogonal_brings_every_singular_value_near_1_and_keeps_the_directions(shape: tuple[int, int]):
    matrix = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    got = u.T @ orthogonal(matrix) @ v.T
    diagonal = got.diagonal()
    well = s > 0.05 * s.max()  # five rounds lift what is not too small
    assert well.sum() > 12
    assert float(diagonal[well].min()) > 0.65 and float(diagonal[well].max()) < 1.25
    assert float((got - torch.diag(diagonal)).abs().max()) < 1e-9


def test_orthogonal_of_zero_is_zero():
    assert torch.equal(orthogonal(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_muon_in_fp32_is_less_sensitive_to_rounding_than_in_bf16():
    """A gradient summed in another order differs by 1e-7; products in bf16 make near one percent of that."""

    def sensitivity(dtype: torch.dtype) -> float:
        gradient = torch.randn(256, 192, generator=torch.Generator().manual_seed(0))
        noise = (
            1e-7 * gradient.abs().max() * torch.randn(256, 192, generator=torch.Generator().manual_seed(1))
        )
        one, other = (orthogonal(update.to(dtype)).float() for update in (gradient, gradient + noise))
        return float((one - other).abs().max() / one.abs().max())

    assert sensitivity(torch.float32) < 1e-5
    assert sensitivity(torch.bfloat16) > 1e-3


def test_muon_refuses_vectors_among_the_matrices():
    with pytest.raises(ValueError, match=r"not parameters of shape \[\(5,\)\]"):
        Muon(
            [{"params": [torch.nn.Parameter(torch.zeros(5))], "orthogonalize": True}],
            lr=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
            momentum=0.95,
        )


def test_a_parameter_without_gradient_is_not_stepped():
    params = parameters()
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer = build_optimizer(params.items(), Section(name="Muon"))
    params["layers.0.attention.wq.weight"].grad = torch.ones(8, 8)
    optimizer.step()
    moved = {name for name, param in params.items() if not torch.equal(param.detach(), before[name])}
    assert moved == {"layers.0.attention.wq.weight"}
