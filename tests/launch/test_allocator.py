"""Freed memory stays with the process: the same tensor made again touches no new pages."""

from __future__ import annotations

import multiprocessing
import resource

import pytest
import torch

from titan5d.launch.allocator import keep_freed_memory


def _step() -> None:
    """What a training step does: activations pile up, all larger than glibc keeps by itself, and go."""
    activations = [torch.ones(megabytes * 2**18) for megabytes in (40, 33, 48, 36)]
    while activations:
        activations.pop()


def _faults_of_remaking(keep: bool, answer) -> None:
    if keep and not keep_freed_memory():
        answer.put(None)
        return
    for _ in range(3):  # until the heap has its size
        _step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        _step()
    answer.put(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def _in_a_process(keep: bool) -> int | None:
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    process = context.Process(target=_faults_of_remaking, args=(keep, answer))
    process.start()
    result = answer.get(timeout=60)
    process.join(60)
    return result


def test_freed_memory_is_used_again():
    kept = _in_a_process(True)
    if kept is None:
        pytest.skip("this C library has no mallopt")
    assert kept < _in_a_process(False) / 10
