"""Which parts of the model form which pipeline stage: a tuple of module names per stage.

    12 layers, 4 stages, embedding and head counted as one layer each: (12 + 2) / 4 = 3.5

    stage 0   tok_embeddings layers.0 layers.1 layers.2       load 4        layout  E,t*3
    stage 1   layers.3 ... layers.6                           load 4                t*4
    stage 2   layers.7 layers.8 layers.9                      load 3                t*3
    stage 3   layers.10 layers.11 norm output                 load 3                t*2,N,H

The stages, one after the other, name the whole model in its own order. That is checked by name, so no layer can be
dropped or be there twice, however the cut was made. Pure Python: the planner cuts models it never builds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

Stages = tuple[tuple[str, ...], ...]
"""Names of the modules of each stage, as in the model: tok_embeddings, layers.0, ..., norm, output."""

_SYMBOLS = {"E": "tok_embeddings", "N": "norm", "H": "output"}
_ITEM = re.compile(r"([EtNH])(?:\*([0-9]{1,4}))?")


def model_parts(n_layers: int) -> tuple[str, ...]:
    """The names of all parts of a model, in the order of the forward pass."""
    return ("tok_embeddings", *(f"layers.{n}" for n in range(n_layers)), "norm", "output")


def split_by_weight(n_layers: int, n_stages: int, first_less: int, last_less: int) -> Stages:
    """Cuts evenly, the embedding counting as `first_less` layers and norm + head as `last_less`.

    Each layer in turn goes to the stage with the least load, the earlier one of two: so loads differ by at most one
    layer, unless an end alone weighs more than its share; and the earlier stages get what does not divide.
    Loads are counted in layers. Stages may come out empty: see `problems`.
    """
    load = [0] * n_stages
    load[0] += first_less
    load[-1] += last_less
    layers = [0] * n_stages
    for _ in range(n_layers):
        lightest = load.index(min(load))
        load[lightest] += 1
        layers[lightest] += 1
    return _with_layers(layers)


def stages_of_size(n_layers: int, layers_per_stage: int, first_less: int, last_less: int) -> int:
    """How many stages it takes when none is to weigh more than `layers_per_stage` layers."""
    return max(1, -(-(n_layers + first_less + last_less) // layers_per_stage))


def parse_layout(text: str) -> Stages:
    """`E,t*3|t*4|t*4|t*3,N,H`: stages between bars, parts between commas; E embedding, t a layer, N norm, H head,
    *n = n times. Raises ValueError saying what cannot be read."""
    stages: list[tuple[str, ...]] = []
    layer = 0
    for index, written in enumerate(text.split("|")):
        names: list[str] = []
        for item in (part.strip() for part in written.split(",")):
            match = _ITEM.fullmatch(item)
            if match is None:
                raise ValueError(
                    f"{item!r} in stage {index} is no part: write E (embedding), t (a layer), N (norm), H (head), or n"
                    " of them as t*n; commas between parts, bars between stages, like E,t*3|t*4|t*3,N,H"
                )
            symbol, times = match.group(1), int(match.group(2) or 1)
            if symbol == "t":
                names += [f"layers.{n}" for n in range(layer, layer + times)]
                layer += times
            else:
                names += [_SYMBOLS[symbol]] * times
        stages.append(tuple(names))
    return tuple(stages)


def format_layout(stages: Stages) -> str:
    """The inverse of `parse_layout`."""
    symbols = {name: symbol for symbol, name in _SYMBOLS.items()}
    written = []
    for stage in stages:
        items = []
        layers = sum(name not in symbols for name in stage)
        for name in stage:
            if name in symbols:
                items.append(symbols[name])
            elif layers:
                items.append("t" if layers == 1 else f"t*{layers}")
                layers = 0  # all of a stage's layers lie side by side
        written.append(",".join(items))
    return "|".join(written)


def from_names(names: Sequence[Sequence[str]], n_layers: int) -> Stages:
    """Stages given as lists of names. Within a stage the order is the model's, however they were listed."""
    place = {name: index for index, name in enumerate(model_parts(n_layers))}
    return tuple(tuple(sorted(stage, key=lambda name: place.get(name, len(place)))) for stage in names)


def problems(stages: Stages, n_layers: int) -> list[str]:
    """Why these stages are not the model, in sentences with names; empty when every part is there once, in order."""
    wanted = model_parts(n_layers)
    count = Counter(name for stage in stages for name in stage)
    found = []
    missing = [name for name in wanted if name not in count]
    unknown = sorted(name for name in count if name not in wanted)
    double = sorted(name for name, times in count.items() if times > 1)
    if missing:
        found.append(f"no stage holds {_listed(missing)}")
    if unknown:
        found.append(
            f"{_listed(unknown)} {'is' if len(unknown) == 1 else 'are'} not in the model, whose parts are"
            f" tok_embeddings, layers.0 to layers.{n_layers - 1}, norm, output"
        )
    if double:
        found.append(f"{_listed(double)} {'is' if len(double) == 1 else 'are'} named more than once")
    empty = [index for index, stage in enumerate(stages) if not stage]
    if empty:
        found.append(
            f"{len(stages)} stages for {n_layers} layers leave stage {', '.join(map(str, empty))} empty"
        )
    if not found and tuple(name for stage in stages for name in stage) != wanted:
        found.append("the stages are not in the order of the model: embedding, layers 0, 1, ..., norm, head")
    return found


def layer_counts(stages: Stages) -> tuple[int, ...]:
    """Layers of each stage."""
    return tuple(sum(name.startswith("layers.") for name in stage) for stage in stages)


def _with_layers(layers: Sequence[int]) -> Stages:
    """The stages with so many layers each, embedding first, norm and head last."""
    stages: list[tuple[str, ...]] = []
    first = 0
    for index, count in enumerate(layers):
        names = [f"layers.{n}" for n in range(first, first + count)]
        before = ["tok_embeddings"] if index == 0 else []
        after = ["norm", "output"] if index == len(layers) - 1 else []
        stages.append((*before, *names, *after))
        first += count
    return tuple(stages)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more
