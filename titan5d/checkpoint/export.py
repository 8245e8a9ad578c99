"""From a checkpoint of ours to Hugging Face's format, by all ranks together."""

from __future__ import annotations

from pathlib import Path

from titan5d.checkpoint.agreement import Agreement
from titan5d.checkpoint.errors import CheckpointRefused, Damaged
from titan5d.checkpoint.hugging_face import cut_into_files, entries, write_description, write_weights
from titan5d.checkpoint.manifest import Manifest, StoredTensor
from titan5d.checkpoint.save import Written
from titan5d.checkpoint.source import CheckpointSource
from titan5d.models.args import ModelArgs
from titan5d.models.families import FAMILIES


def to_hugging_face(
    folder: Path, written: Written, family: str, args: ModelArgs, tokenizer: str, agreement: Agreement
) -> Written:
    """Replaces the weights that all ranks have `written` into `folder` by files in Hugging Face's format. Collective.

    The files are shared out over the ranks; none holds more than one tensor. Returns what this rank has written now;
    problems are returned, not raised.
    """
    parts = agreement.gather(written)
    if any(part.problems for part in parts):
        return written
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for key, stored in part.tensors.items():
            tensors.setdefault(key, StoredTensor(stored.dtype, stored.shape, [])).chunks.extend(stored.chunks)
    source = CheckpointSource(folder, Manifest(0, "weights", tensors=tensors))
    records, problems = {}, list[str]()
    try:
        files = cut_into_files(entries(source, FAMILIES[family].hf_name_map(args), None))
        records = write_weights(source, files, folder, agreement.rank, agreement.ranks)
        if agreement.rank == 0:
            records |= write_description(files, family, args, tokenizer, folder)
    except OSError as error:
        problems.append(f"{error.filename}: {error.strerror} (errno {error.errno})")
    except CheckpointRefused as refused:
        problems += refused.problems
    except (Damaged, ValueError) as error:
        problems.append(str(error))
    agreement.most(0)  # every rank has read what it needs
    for file in written.files:
        (folder / file).unlink(missing_ok=True)
    return Written(records, {}, problems)
