from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from titan5d.config.help import config_help
from titan5d.config.load import ConfigError, load_config, to_toml
from titan5d.config.schema import Config


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str, name: str = "run.toml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def problems(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    return error.value.problems


def test_flags_win_over_the_file_in_every_form(toml) -> None:
    path = toml("[training]\nsteps = 5\nseq_len = 7\n")
    config = load_config(
        [
            "--config",
            path,
            "--training.steps=9",
            "--optimizer.lr",
            "1e-3",
            "--compile.enable",
            "--training.global_batch_size",
            "-1",
        ]
    )
    assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (9, 7, 1e-3)
    assert config.compile.enable and config.training.global_batch_size == -1


def test_text_keys_take_numbers_as_text(toml) -> None:
    config = load_config(
        ["--config", toml(""), "--activation_checkpoint.selective_ac_option", "2", "--model.flavor", "1B"]
    )
    assert config.activation_checkpoint.selective_ac_option == "2" and config.model.flavor == "1B"


def test_lists_and_whole_numbers_for_floats(toml) -> None:
    config = load_config(["--config", toml("[training]\nmax_norm = 1\n"), '--compile.components=["model"]'])
    assert config.training.max_norm == 1.0 and config.compile.components == ["model"]


def test_all_problems_at_once_with_path_and_suggestion(toml) -> None:
    path = toml(
        '[training]\nstepz = 1\nsteps = "x"\n[parallelism]\nzero_stage = 7\nseq_len = 4\n[oops]\na = 1\n'
    )
    found = problems(["--config", path, "--training.local-batch-size", "two"])
    assert len(found) == 6
    text = "\n".join(found)
    assert "training.stepz: unknown key; did you mean training.steps?" in text
    assert 'training.steps = "x": should be a valid integer' in text
    assert "parallelism.zero_stage = 7: should be 0, 1, 2 or 3" in text
    assert "parallelism.seq_len: unknown key; it is called training.seq_len here" in text
    assert "oops: unknown key" in text
    assert 'training.local_batch_size = "two"' in text


def test_extends_chains_and_refuses_a_circle(toml) -> None:
    toml("[training]\nsteps = 1\nseq_len = 2\n[model]\nflavor = '8B'\n", "base.toml")
    toml("extends = 'base.toml'\n[training]\nsteps = 3\n", "middle.toml")
    config = load_config(["--config", toml("extends = 'middle.toml'\n[training]\nlocal_batch_size = 4\n")])
    assert (config.training.steps, config.training.seq_len, config.model.flavor) == (3, 2, "8B")
    toml("extends = 'two.toml'", "one.toml")
    assert "comes back to itself" in problems(["--config", toml("extends = 'one.toml'", "two.toml")])[0]


def test_unknown_config_name_lists_the_known(toml) -> None:
    assert "llama3_8b" in problems(["--config", "lama"])[0]


def test_broken_toml_and_stray_words_are_named(toml) -> None:
    assert "run.toml" in problems(["--config", toml("a = = 1")])[0]
    assert problems(["train"])[0].startswith("`train` is not a flag")
    assert "has the form --section.key" in problems(["--steps", "3"])[0]


def test_older_spellings_are_understood_with_a_note(toml) -> None:
    notes: list[str] = []
    config = load_config(
        [
            "--config",
            toml(
                "[training]\ncompile = true\n[model]\nflavor = 'debugmodel'\n[float8]\nrecipe_name = 'rowwise'\n"
            ),
        ],
        notes,
    )
    assert config.compile.enable and config.model.flavor == "debug"
    assert config.quantize.linear.float8.recipe_name == "rowwise"
    assert "training.compile is now called compile.enable" in notes and len(notes) == 2


def test_resolved_config_reads_back_equal(toml, tmp_path: Path) -> None:
    config = load_config(["--config", toml("[training]\nsteps = 3\n[lr_scheduler]\ndecay_ratio = 0.1\n")])
    (tmp_path / "saved.toml").write_text(to_toml(config))
    again = load_config(["--config", str(tmp_path / "saved.toml")])
    ours, theirs = asdict(config), asdict(again)
    ours["job"].pop("config_file"), theirs["job"].pop("config_file")
    assert ours == theirs


def test_every_key_has_a_docstring_and_is_in_the_help() -> None:
    text = config_help()

    def walk(table: dict, prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                assert f"[{prefix}{key}]  " in text
                walk(value, f"{prefix}{key}.")
            else:
                _, _, below = text.partition(f"--{prefix}{key}  <")
                assert below, f"{prefix}{key} is missing"
                assert below.splitlines()[1].strip(), f"{prefix}{key} has no docstring"

    walk(asdict(Config()), "")
    assert "no section called nonsense" in config_help("nonsense")


@pytest.mark.parametrize("path", sorted(Path("train_configs").glob("*.toml")), ids=lambda path: path.stem)
def test_committed_configs_load_and_stay_readable(path: Path) -> None:
    load_config(["--config", str(path)])
    assert len(path.read_text().splitlines()) <= 80
    assert tomllib.loads(path.read_text())["job"]["description"]
