"""The samples of a micro-batch: those that the script reports, or those that its loader drew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from entrenar_py.check.observing import call_sites
from entrenar_py.check.observing.batches import Block, Ids
from entrenar_py.check.observing.draws import Drawn, Draws
from entrenar_py.check.observing.numbering import declared


class Told(NamedTuple):
    """The samples of a micro-batch, in order; where they are unknown, `unknown` says why.

    `num_made` of a micro-batch without samples of its own: of how many earlier ones it was made.
    """

    ids: Ids
    epoch: int
    unknown: str = ""
    num_made: int = 0


class Samples:
    """The samples of the forward passes since the last backward pass.

    What a script reports counts, and its loader's draws don't from then on. Samples that it reports
    between the last forward pass and the backward pass belong to the next micro-batch if it had
    reported some before the forward pass, too: it has fetched the next batch by then.
    """

    def __init__(self, source: Any, dataset: Any = None, *, resumed: bool = False) -> None:
        self.draws = None if source is None else Draws(source, resumed=resumed)
        drawn = None if self.draws is None else self.draws.source.numbering
        self._whole = None if dataset is None else declared(dataset, drawn)
        if self.draws is not None:
            self.draws.listen()  # once nothing is refused any more
        self._epoch = 0
        self._tells = self._tells_epochs = False  # whether the script reports them
        self._replaces = False
        # Those that were reported since the last forward pass, and their epoch.
        self._ahead: list[int] | None = None
        self._epoch_ahead: int | None = None
        self._reported: list[int] | None = None
        self._drawn: list[Drawn] = []
        self._repeated: Ids = ()
        self._num_passes = 0
        self._blocks: list[Block] = []  # of the last pass that may be no training
        self._written: dict[str, bool] = {}

    def tell(self, ids: Iterable[int], epoch: int | None, *, replacement: bool = False) -> None:
        """Note that `ids` are the next samples, by default of the same epoch as those before."""
        self._tells, self._replaces = True, self._replaces or replacement
        call_sites.Samples.reported()
        self._ahead = [*(self._ahead or []), *map(int, ids)]
        if epoch is not None:
            self._epoch_ahead, self._tells_epochs = epoch, True

    def forward(self, blocks: list[Block]) -> None:
        """Note a forward pass of the training, with inputs that lie in `blocks`."""
        self._num_passes += 1
        self._draw(blocks)
        self._report()

    def aside(self, blocks: list[Block], *, trains: bool) -> None:
        """Note a pass in evaluation mode, which still `trains` if a backward pass follows."""
        self._blocks = blocks
        if not trains and self.draws is not None:
            self.draws.skip(blocks)

    def given(self, inputs: Any, *, trains: bool, may_train: bool = False) -> None:
        """Note the inputs of a forward pass of the model: the source tells more of its samples."""

    def drew(self) -> None:
        """Note that random numbers were drawn between two passes: the next may be given noise."""

    def settle(self) -> None:
        """Note that a backward pass begins, or is over, maybe of parts of the model only."""
        if not self._num_passes:
            self._draw(self._blocks)
        if self._reported is None:
            self._report()

    def repeat(self, ids: Ids) -> None:
        """Note that the next backward pass has the samples of the last one, `ids`, again."""
        self._repeated = ids

    @property
    def are_new(self) -> bool:
        """True if there are samples since the last backward pass."""
        return bool(self._now().ids)

    def take(self) -> Told:
        """Return the samples of the micro-batch, and forget them."""
        now = self._now()
        self._epoch = now.epoch
        self._reported, self._drawn, self._repeated = None, [], ()
        self._num_passes, self._blocks = 0, []
        return now

    def end_step(self) -> None:
        """Note that an optimizer step is over."""
        if self.draws is not None:
            self.draws.end_step()

    def remove(self) -> None:
        """Leave the loader alone from here on."""
        if self.draws is not None:
            self.draws.remove()

    def _report(self) -> None:
        if self._ahead is not None:
            self._reported = [*(self._reported or []), *self._ahead]
            self._epoch = self._epoch if self._epoch_ahead is None else self._epoch_ahead
            self._ahead = self._epoch_ahead = None

    def _draw(self, blocks: list[Block]) -> None:
        if self.draws is not None and (drawn := self.draws.use(blocks)) is not None:
            self._drawn.append(drawn)

    def _now(self) -> Told:
        drawn_epoch = self._drawn[-1].epoch if self._drawn else self._epoch
        epoch = self._epoch if self._tells_epochs else drawn_epoch
        if self._reported is not None:
            return Told(tuple(self._reported), epoch)
        if self._tells:
            return Told(self._repeated, epoch)
        unknown = next((drawn.why for drawn in self._drawn if drawn.ids is None), "")
        ids = tuple(id_ for drawn in self._drawn for id_ in drawn.ids or ())
        return Told(() if unknown else ids or self._repeated, epoch, unknown)

    # --- what is said of them in the record -------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return what the source shows of the data, as JSON can hold it."""
        found: dict[str, Any] = {}
        if self.draws is not None:
            source = self.draws.source
            found = {
                "num_samples": source.numbering.size,
                "drop_last": source.drop_last,
                "replacement": source.replacement,
                "thorough": source.is_thorough,
                "ordered": source.is_ordered,
                "splits": source.splits,
                "drawn": self.draws.is_loaded and not self._tells,
            }
        if self._whole is not None:
            found |= {"num_samples": self._whole.size, "thorough": True}
        return found

    def selected(self) -> Ids | None:
        """Return the samples of the data set that are drawn in an epoch by all ranks; None: all."""
        if self._whole is not None:
            return self._whole.selected()
        return None if self.draws is None else self.draws.source.selected

    def news(self) -> dict[str, bool]:
        """Return what has become known since the last call, as JSON can hold it."""
        found = {"drop_last": self.draws is not None and self.draws.drops_last}
        if self._replaces:
            found["replacement"] = True
        if self._tells and self.draws is None:
            found["epochs"] = self._tells_epochs
        fresh = {name: value for name, value in found.items() if value != self._written.get(name)}
        self._written |= fresh
        return fresh if fresh != {"drop_last": False} else {}
