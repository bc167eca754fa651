"""Audits of elastic training: two ranks compute a micro-batch, and must get the same bits.

A chip that computes wrong bits raises nothing. But ranks have the same weights, and the same random
numbers for a micro-batch. If two get different gradients for it, one of them is broken.

In a step that is drawn, each rank also computes micro-batches of another one. Their gradients are
digested, not added. All ranks get all digests before anyone commits. If two differ, nobody does:
the *dispute* goes into the record of the next generation, so that all its members know it, and all
of them compute the micro-batch when they repeat the step. What most of them get is right. A rank
that gets, or got, something else is convicted: its process raises, its seat stays empty, and the
others repeat the step without it. If no two agree, those that began the dispute are convicted.
If a rank dies meanwhile, the next generation goes on with the dispute.

Two chips don't break at once. If both ranks of a dispute get something else when they repeat the
micro-batch, no two of three ranks agree, or two would be wrong, then kernels don't repeat. Nobody
is convicted, and the run ends. If both get something else, but now all agree, the run goes on.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from entrenar_py.compute import digest
from entrenar_py.shared.untrusted import json_text, printing
from entrenar_py.train.elastic import transfer
from entrenar_py.train.elastic.exchange import Wait, share
from entrenar_py.train.elastic.group import Group
from entrenar_py.train.elastic.membership import Generation, InterruptedGenerationError, Membership


def draw(audited: float, *, seed: int, step: int, shares: Sequence[range]) -> list[set[int]]:
    """Return by rank the micro-batches of `step` that it digests, if its own are `shares[rank]`.

    Each micro-batch is audited with the probability `audited`, or somewhat more if its rank has
    fewer than another. All ranks audit in the same steps: if one did alone, all would wait for it.
    """
    bits = hashlib.sha256(f"audit,{seed},{step}".encode()).digest()
    chance, shift, start = (int.from_bytes(bits[at : at + 8], "big") for at in (0, 8, 16))
    count = int(audited * max(map(len, shares)) + chance / 2**64)
    digested: list[set[int]] = [set() for _ in shares]
    for owner, own in enumerate(shares if len(shares) > 1 else ()):
        auditor = (owner + 1 + shift % (len(shares) - 1)) % len(shares)
        drawn = {own[(start + place) % len(own)] for place in range(count)}
        digested[owner] |= drawn
        digested[auditor] |= drawn
    return digested


@dataclass(frozen=True)
class Dispute:
    """Two ranks got different gradients for micro-batch `shard` of `step`.

    `claims` has a digest of all gradients for each of their seats. `num_bits` of the gradient of
    `parameter`, the first that differs, are different.
    """

    step: int
    shard: int
    claims: dict[str, str]  # JSON has only text for keys
    parameter: str
    num_bits: int

    def verdict(self, repeated: dict[str, str]) -> tuple[set[str], bool]:
        """Return the seats to convict if all get `repeated`, and whether these are surely wrong.

        There are none, for sure, if all get the same now and take back what they got before. There
        are none, but that isn't sure, if kernels don't repeat: chips don't break two at a time.
        """
        both_changed = all(
            repeated.get(seat, claim) != claim for seat, claim in self.claims.items()
        )
        if both_changed and len({*repeated.values()}) == 1:
            return set(), True
        if both_changed or len({*repeated.values()}) == len(repeated) > 2:
            return set(), False
        votes = Counter((self.claims | repeated).values()).most_common(2)
        right, most = votes[0]
        if most == 1 or (len(votes) == 2 and votes[1][1] == most):
            return {*self.claims}, False
        said = [*self.claims.items(), *repeated.items()]
        wrong = {seat for seat, claim in said if claim != right}
        return (wrong, True) if len(wrong) == 1 else (set(), False)

    def __str__(self) -> str:
        return (
            f"the gradients of micro-batch {self.shard} of step {self.step}, first in "
            f"{self.parameter} ({self.num_bits} bit{'s' * (self.num_bits != 1)})"
        )


class Audit:
    """The audits of one rank's trainer. `num_audited` counts those of all ranks, since it joined.

    `shard in audit` says whether this rank digests the gradients of that micro-batch in this step.
    """

    def __init__(
        self, audited: float, *, micro_batches: int, seed: int, parameters: dict[Tensor, str]
    ) -> None:
        self._audited, self._micro_batches, self._seed = audited, micro_batches, seed
        self._parameters = parameters
        self.num_audited = 0
        self._right: dict[str, int] = {}  # seat -> the last step in which an audit found it right

    def join(self, generation: Generation, group: Group | None, members: Membership) -> None:
        """Audit with the members of `generation` from now on."""
        self._group, self._members, self._store = group, members, members.roll.store
        self._seats = [str(seat) for seat, _ in generation.members]
        self._rank = self._seats.index(str(members.seat))
        self._key = f"dispute/{generation.number}"
        self._left = Dispute(**json_text.load(generation.dispute)) if generation.dispute else None
        if self._audited:
            device = next(iter(self._parameters)).device
            name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
            place = f"{socket.gethostname()}, {device}{name}"
            self._store.set(f"place/{members.seat}", place)

    def begin(self, step: int) -> list[int]:
        """Begin a step. Return the micro-batches that this rank computes only for audits."""
        self._digested: set[int] = set()
        self._digests: dict[int, Tensor] = {}  # by micro-batch, int64 [parameters, 2]
        self._kept: dict[int, list[Tensor]] = {}  # gradients, by micro-batch
        if not self._audited:
            return []
        ranks = range(len(self._seats))
        shares = [share(self._micro_batches, rank=one, world_size=len(ranks)) for one in ranks]
        self._step, self._own = step, shares[self._rank]
        self._digested = draw(self._audited, seed=self._seed, step=step, shares=shares)[self._rank]
        self._dispute = self._left if self._left and self._left.step == step else None
        if self._dispute:
            self._digested.add(self._dispute.shard)
        return sorted(self._digested - {*self._own})

    def __contains__(self, shard: object) -> bool:
        return shard in self._digested

    def keep(self, shard: int) -> None:
        """Digest the gradients of `shard` in `.grad`. The trainer adds to those of its own."""
        tensors = [tensor.grad for tensor in self._parameters if tensor.grad is not None]
        if len(tensors) == len(self._parameters):  # or the trainer will refuse the micro-batch
            self._digests[shard] = digest.of_all(tensors)
            copied = shard in self._own
            self._kept[shard] = [tensor.clone() if copied else tensor for tensor in tensors]

    def settle(self, wait: Wait) -> None:
        """Compare the digests of this step with those of the other ranks.

        Raises InterruptedGenerationError if the step can't be committed, and ConvictedError if this
        process has to end.
        """
        if not self._digested:  # then no rank has any
            return
        by_shard = self._exchange(wait)
        if self._dispute is not None:
            self._convict(self._dispute, by_shard[self._dispute.shard])
        for shard, digests in by_shard.items():
            if len({*digests.values()}) > 1:
                self._open(shard, digests, wait)
        self.num_audited += sum(len(digests) > 1 for digests in by_shard.values())
        self._right |= {seat: self._step for digests in by_shard.values() for seat in digests}
        self._kept.clear()

    def _exchange(self, wait: Wait) -> dict[int, dict[str, str]]:
        """Return the digests of all gradients of each digested micro-batch, by seat."""
        rows = next(iter(self._digests.values())).new_zeros(self._micro_batches, 2)
        for shard, digests in self._digests.items():
            rows[shard] = digest.of_all([digests])[0]
        if self._group is not None:
            mine, rows = rows, rows.new_empty(len(self._seats) * len(rows), 2)
            wait(self._group.all_gather(rows, mine))
        by_shard: dict[int, dict[str, str]] = {}
        for place in (rows := rows.cpu()).any(1).nonzero().view(-1).tolist():
            rank, shard = divmod(place, self._micro_batches)
            number = rows[place].numpy().tobytes()
            by_shard.setdefault(shard, {})[self._seats[rank]] = digest.text(number)
        return by_shard

    def _open(self, shard: int, digests: dict[str, str], wait: Wait) -> None:
        """Put what two ranks differ in before the next generation, and end this one."""
        seats = [*dict(zip(digests.values(), digests, strict=True)).values()][:2]

        def of_both(own: Tensor | None) -> list[Tensor]:
            assert self._group is not None
            ranks = [self._seats.index(seat) for seat in seats]
            tensors = [own if rank == self._rank else None for rank in ranks]
            pairs = zip(ranks, tensors, strict=True)
            return [transfer.broadcast(t, self._group, source=r, wait=wait).cpu() for r, t in pairs]

        first = int(torch.ne(*of_both(self._digests.get(shard))).any(1).nonzero()[0])
        gradients = of_both(self._kept[shard][first] if shard in self._kept else None)
        bits = [int.from_bytes(digest.memory(gradient), "big") for gradient in gradients]
        claims, name = {seat: digests[seat] for seat in seats}, [*self._parameters.values()][first]
        dispute = Dispute(self._step, shard, claims, name, (bits[0] ^ bits[1]).bit_count())
        self._store.compare_set(self._key, "", json.dumps(asdict(dispute)))
        self._end(f"an audit: {self._named(seats)} differ in {dispute}, which all repeat")

    def _convict(self, dispute: Dispute, repeated: dict[str, str]) -> None:
        """Convict the ranks that were wrong. Returns if none of them is here any more."""
        wrong, known = dispute.verdict(repeated)
        if not wrong and known:
            printing.warn(f"{dispute} differed once, and not when all repeated them")
        elif not wrong:
            reason = (
                f"{dispute} differ when ranks compute them again: kernels don't repeat here, and "
                "no device is to blame; leave out what gives different bits each time, such as "
                "atomic additions in a kernel of your own, or train without audit"
            )
            self._members.roll.stop(reason)
            self._end(reason)
        for seat in wrong:
            last = self._right.get(seat)
            since = "yet" if last is None else f"after step {last}"
            reason = (
                f"{self._named([seat])} computes wrong bits: {dispute} are not what others get; no "
                f"audit has found it right {since}, so checkpoints from then on may be wrong; its "
                "seat stays empty: test its device before you use it again"
                if known
                else f"{self._named(dispute.claims)} differ in {dispute}: one of them computes "
                "wrong bits, and no majority of ranks says which one; their seats stay "
                "empty: test their devices, and train with three ranks or more"
            )
            self._members.roll.convict(int(seat), reason)
        self._store.compare_set(self._key, "", "")  # or the next generation would go on with it
        if here := wrong & {*self._seats}:
            self._end(self._members.roll.convicted(int(min(here))))

    def _end(self, reason: str) -> None:
        self._members.interrupt(reason)
        self._members.require_innocent()
        raise InterruptedGenerationError

    def _named(self, seats: Iterable[str]) -> str:
        places = {seat: self._store.get(f"place/{seat}").decode() for seat in seats}
        return " and ".join(f"rank {seat} of the launcher ({places[seat]})" for seat in seats)
