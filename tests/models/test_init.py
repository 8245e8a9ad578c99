"""Counter initialization: every slice bitwise equal to the whole, and the numbers random enough."""

from __future__ import annotations

import hashlib
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch

from titan5d.models import init
from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.models.init import InitSpec, fill_slice, init_specs, init_weights_, normal_cdf

NORMAL, CUT = InitSpec("normal"), InitSpec("trunc_normal")
TINY = ModelArgs(dim=64, n_layers=3, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=256)


def whole(shape: tuple[int, ...], spec: InitSpec = NORMAL, name: str = "w", seed: int = 0) -> torch.Tensor:
    return fill_slice(seed, name, shape, (0,) * len(shape), shape, spec)


@pytest.mark.parametrize("spec", [NORMAL, CUT], ids=["normal", "trunc_normal"])
@pytest.mark.parametrize("shape", [(1009,), (31, 67), (7, 17, 19)], ids=str)
def test_any_slice_equals_the_whole(
    shape: tuple[int, ...], spec: InitSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths around the width of vector registers, odd offsets, chunks of several sizes."""
    expected = whole(shape, spec)
    draw = random.Random(0)
    for trial in range(40):
        monkeypatch.setattr(init, "CHUNK", draw.choice([9, 64, 1000, 2**16]))
        sizes = [draw.choice([1, 7, 8, 9, draw.randint(1, whole_size), whole_size]) for whole_size in shape]
        sizes = [min(size, whole_size) for size, whole_size in zip(sizes, shape, strict=True)]
        offsets = [draw.randint(0, whole_size - size) for size, whole_size in zip(sizes, shape, strict=True)]
        block = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        part = fill_slice(0, "w", shape, offsets, sizes, spec)
        assert torch.equal(part, expected[block]), (trial, offsets, sizes)


def test_empty_and_scalar_blocks() -> None:
    assert fill_slice(0, "w", (4, 4), (4, 0), (0, 4), NORMAL).shape == (0, 4)
    assert whole(()).shape == ()


def test_threads_do_not_change_bits() -> None:
    before = torch.get_num_threads()
    one = whole((300, 1000))
    try:
        torch.set_num_threads(2)
        two = whole((300, 1000))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


def by_integers(seed: int, name: str, index: int) -> float:
    """The definition in Python's own integers and the exact inverse CDF."""
    mask = 2**64 - 1
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    z = (index * 0x9E3779B97F4A7C15 + int.from_bytes(digest[:8], "little")) & mask
    z ^= z >> 30
    z = (z * 0xBF58476D1CE4E5B9) & mask
    z ^= int.from_bytes(digest[8:16], "little")
    z ^= z >> 27
    z = (z * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    if z >= 2**63:
        z -= 2**64
    uniform = 0.5 + ((z >> 12) + 0.5) * 2.0**-52
    return statistics.NormalDist().inv_cdf(uniform)


def test_elements_far_beyond_32_bits() -> None:
    """A tensor of 2 * 10^12 elements, of which a few are drawn."""
    shape = (2_000_000, 1_000_003)
    for row, column in ((0, 0), (0, 12345), (4294, 967_000), (1_999_999, 1_000_000)):
        part = fill_slice(3, "big", shape, (row, column), (1, 3), NORMAL)
        expected = [by_integers(3, "big", row * shape[1] + column + i) for i in range(3)]
        assert part[0].tolist() == pytest.approx(expected, rel=1e-7)


def test_seed_and_name_choose_the_numbers() -> None:
    shape = (64, 64)
    assert torch.equal(whole(shape, name="a", seed=1), whole(shape, name="a", seed=1))
    for name, seed in (("b", 1), ("a", 2), ("a", -1)):
        assert (whole(shape, name="a", seed=1) == whole(shape, name=name, seed=seed)).sum() == 0
    alias = InitSpec("normal", drawn_as="a")
    assert torch.equal(whole(shape, name="a"), whole(shape, alias, name="b"))


def test_inverse_cdf_and_cdf_are_accurate() -> None:
    tails = 10.0 ** -torch.linspace(0.31, 11, 4000, dtype=torch.float64)
    for centred in (tails - 0.5, 0.5 - tails):
        ours = init._inverse_cdf(centred)
        inverse = statistics.NormalDist().inv_cdf
        expected = torch.tensor([inverse(0.5 + c) for c in centred.tolist()], dtype=torch.float64)
        assert ((ours - expected) / expected).abs().max() < 2e-6  # 0.5 +- tail is itself rounded
    middle = torch.linspace(-0.49, 0.49, 1001, dtype=torch.float64)
    expected = torch.special.ndtri(middle + 0.5)
    torch.testing.assert_close(init._inverse_cdf(middle), expected, rtol=2e-9, atol=1e-12)
    exact = statistics.NormalDist()
    assert max(abs(normal_cdf(x / 10) - exact.cdf(x / 10)) for x in range(-50, 51)) < 1e-10


N = 1_000_000


def test_moments_of_the_normal() -> None:
    x = whole((1000, N // 1000), InitSpec("normal", 0.5)).double() / 0.5
    # bound: 4.5 standard errors sqrt(spread / N)
    for moment, expected, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(x.pow(moment).mean() - expected) < 4.5 * math.sqrt(spread / N), moment


def test_moments_and_bounds_of_the_truncated_normal() -> None:
    x = whole((N,), InitSpec("trunc_normal", 0.02)).double()
    assert x.abs().max() <= 0.06 * (1 + 1e-7)
    assert x.abs().max() > 0.0599
    density, mass = math.exp(-4.5) / math.sqrt(2 * math.pi), math.erf(3 / math.sqrt(2))
    std = 0.02 * math.sqrt(1 - 6 * density / mass)
    assert abs(x.std() - std) < 4.5 * std / math.sqrt(2 * N)
    assert abs(x.mean()) < 4.5 * std / math.sqrt(N)
    lopsided = whole((N,), InitSpec("trunc_normal", 1.0, a=-0.5, b=2.0))
    assert lopsided.min() >= -0.5 and lopsided.max() <= 2.0
    lost = 1 - (normal_cdf(0.0) - normal_cdf(-0.5)) / (normal_cdf(2.0) - normal_cdf(-0.5))
    assert abs((lopsided > 0).double().mean() - lost) < 4.5 * 0.5 / math.sqrt(N)


@pytest.mark.parametrize("spec", [NORMAL, CUT], ids=["normal", "trunc_normal"])
def test_uniform_after_the_cdf(spec: InitSpec) -> None:
    """Chi-square over 256 equal cells, and again for cells of pairs of neighbours."""
    x = whole((N,), spec).double()
    uniform = torch.special.ndtr(x)
    if spec.kind == "trunc_normal":
        uniform = (uniform - normal_cdf(-3.0)) / (normal_cdf(3.0) - normal_cdf(-3.0))
    cells = (uniform * 256).long().clamp(0, 255)
    pairs = (uniform[::2] * 16).long().clamp(0, 15) * 16 + (uniform[1::2] * 16).long().clamp(0, 15)
    for index in (cells, pairs):
        counts, expected = torch.bincount(index, minlength=256).double(), len(index) / 256
        chi_square = float((counts - expected).square().sum() / expected)
        assert abs(chi_square - 255) < 4.5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("lag", [1, 2, 3, 7, 8, 16, 64, 256, 1000, 4096, 65536])
def test_neighbours_are_uncorrelated(lag: int) -> None:
    x = whole((N,)).double()
    n = N - lag
    for one, two in ((x[lag:], x[:-lag]), (x[lag:].square() - 1, x[:-lag].square() - 1)):
        assert abs((one * two).mean()) < 4.5 * float(one.std() * two.std()) / math.sqrt(n)


def test_names_and_seeds_are_uncorrelated() -> None:
    streams = [whole((N // 10,), name=f"layers.{n}.attention.wq.weight") for n in range(6)]
    streams += [whole((N // 10,), name="layers.0.attention.wq.weight", seed=seed) for seed in range(1, 6)]
    matrix = torch.corrcoef(torch.stack(streams).double()) - torch.eye(len(streams), dtype=torch.float64)
    assert matrix.abs().max() < 4.5 / math.sqrt(N / 10)
    # nor is one stream another one shifted
    a, b = streams[0].double(), streams[1].double()
    spectrum = torch.fft.irfft(torch.fft.rfft(a) * torch.fft.rfft(b).conj()) / len(a)
    assert spectrum.abs().max() < 6.5 / math.sqrt(len(a))  # the largest of 10^5


def test_every_input_bit_moves_half_of_the_output_bits() -> None:
    base = torch.randint(2**40, (2000,), generator=torch.Generator().manual_seed(0))
    keys = init._keys(0, "w")
    before = init._hash(base.clone(), keys)
    for bit in range(40):
        changed = before ^ init._hash(base ^ (1 << bit), keys)
        for out in range(64):
            share = float(((changed >> out) & 1).double().mean())
            assert abs(share - 0.5) < 6 * 0.5 / math.sqrt(2000), (bit, out)


def test_blocks_outside_are_refused() -> None:
    for offsets, sizes in (((0, 3), (2, 2)), ((-1, 0), (2, 2)), ((0,), (2,))):
        with pytest.raises(ValueError, match="is not inside a tensor of"):
            fill_slice(0, "w", (4, 4), offsets, sizes, NORMAL)


@pytest.mark.parametrize(
    "args",
    [TINY, replace(TINY, tie_embeddings=True, attention_bias=True, qk_norm=True)],
    ids=["plain", "all options"],
)
def test_every_parameter_has_a_spec_and_its_statistics(args: ModelArgs) -> None:
    model, specs = Decoder(args), init_specs(args)
    init_weights_(model, 0)
    assert set(specs) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        spec, std = specs[name], float(parameter.detach().std())
        if spec.kind in ("ones", "zeros"):
            assert torch.equal(parameter, torch.full_like(parameter, float(spec.kind == "ones"))), name
        else:
            expected = spec.std * (0.98658 if spec.kind == "trunc_normal" else 1)
            assert abs(std / expected - 1) < 5 / math.sqrt(2 * parameter.numel()), name
    if args.tie_embeddings:
        assert specs["tok_embeddings.weight"].std == args.dim**-0.5
    assert specs["layers.2.feed_forward.w2.weight"].std == 0.02 / math.sqrt(6)


def test_a_stage_starts_as_the_whole_does() -> None:
    args = replace(TINY, tie_embeddings=True)
    model, stage = Decoder(args), Decoder(args)
    stage.tok_embeddings = None
    del stage.layers["0"]
    init_weights_(model, 5)
    init_weights_(stage, 5)
    assert model.tok_embeddings is not None
    expected = dict(model.named_parameters()) | {"output.weight": model.tok_embeddings.weight}
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_golden_numbers() -> None:
    """A change of these numbers changes the start of every run: never by accident."""
    assert whole((4,), NORMAL, "tok_embeddings.weight").tolist() == GOLDEN
    expected = [by_integers(0, "tok_embeddings.weight", index) for index in range(4)]
    assert pytest.approx(expected, rel=1e-7) == GOLDEN


GOLDEN = [0.6024453639984131, -0.13440027832984924, -0.6861289739608765, 0.07128725200891495]
