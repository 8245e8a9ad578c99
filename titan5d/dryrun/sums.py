"""What adds up over the micro-batches of a step: traffic and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from titan5d.dryrun.flops import FlopCount
from titan5d.metrics.ledger import CommunicationLedger, Entry, Traffic


@dataclass(frozen=True)
class Sums:
    """From the start of the step to some moment."""

    traffic: tuple[Entry, ...]
    products: int
    attention: int

    @classmethod
    def of(cls, traffic: CommunicationLedger, flops: FlopCount) -> Sums:
        return cls(tuple(traffic.entries), flops.products, flops.attention)

    def repeated(self, begin: Sums, end: Sums, times: int) -> Sums:
        """With what came between two earlier moments `times` more."""
        before = {_key(entry): entry.traffic for entry in begin.traffic}
        between = {
            _key(entry): entry.traffic + -1 * before.get(_key(entry), Traffic()) for entry in end.traffic
        }
        entries = tuple(
            Entry(*_key(entry), entry.traffic + times * between.get(_key(entry), Traffic()))
            for entry in self.traffic
        )
        return Sums(
            entries,
            self.products + times * (end.products - begin.products),
            self.attention + times * (end.attention - begin.attention),
        )


def _key(entry: Entry) -> tuple[str, str, str]:
    return entry.axis, entry.op, entry.dtype
