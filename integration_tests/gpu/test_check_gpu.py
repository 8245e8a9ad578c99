"""The script for a machine with a GPU: what it says without one, and that its checks can fail."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from integration_tests.gpu.check_gpu import VARIANTS, Outcome, judge, main, table, words_of
from titan5d.config.check_precision import precision_problems
from titan5d.config.load import load_config

GOOD = Outcome([5.0, 4.0], tps=1000.0, mfu=0.4, peak=10.0, planned=11.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_gpu() -> None:
    assert main(["--steps", "8"]) == 0


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out == "skipped: no CUDA device\n"


def test_the_flags_of_every_variant_are_keys(tmp_path: Path) -> None:
    options = argparse.Namespace(flavor="1B", steps=2, batch=1, seq_len=128)
    for variant in VARIANTS:
        config = load_config(words_of(variant, options, tmp_path), [])
        assert not [problem for problem in precision_problems(config) if "not installed" not in problem]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (replace(GOOD, losses=[5.0, 5.1]), "loss did not fall"),
        (replace(GOOD, losses=[5.0, 4.2]), "5.00% from bf16"),
        (replace(GOOD, peak=20.0), "memory is 1.82 of the plan"),
        (replace(GOOD, mfu=0.05), "MFU 5.0% is below"),
        (replace(GOOD, tps=900.0), "slower than bf16"),
        (replace(GOOD, problem="exit status 1"), "exit status 1"),
    ],
)
def test_every_breach_is_said(bad: Outcome, words: str) -> None:
    compiled = VARIANTS[1]
    assert judge(compiled, {"bf16": GOOD, compiled.name: GOOD}) == ""
    outcomes = {"bf16": GOOD, compiled.name: bad}
    verdict = judge(compiled, outcomes)
    assert words in verdict
    assert verdict in table(outcomes, {"bf16": "", compiled.name: verdict})
