"""Which mesh axis a process group is: many groups, few names."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist


class AxisNames:
    """Names this rank's groups by axis.

    Args:
        groups: axis name -> this rank's group along it, e.g. `Meshes.groups()`. Where two axes are the same ranks the
            first name wins. A group that is not among them goes under the name of an axis with the same ranks, or else
            under "ranks 0,1,...".
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._by_group: dict[str, str] = {}  # group name -> axis
        self._by_ranks: dict[tuple[int, ...], str] = {}
        for axis, group in groups.items():
            self._by_group.setdefault(group.group_name, axis)
            self._by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), axis)
        self.shared = [axis for axis, group in groups.items() if group.size() > 1]
        """The axes of several ranks."""

    def of(self, group: dist.ProcessGroup) -> str:
        """The axis of a group of this process."""
        if (axis := self._by_group.get(group.group_name)) is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            axis = self._by_ranks.get(ranks, f"ranks {','.join(map(str, ranks))}")
            self._by_group[group.group_name] = axis
        return axis
