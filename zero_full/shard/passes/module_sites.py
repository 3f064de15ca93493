"""Modules whose parameters are gathered for use, their calls, and the order in which they are called."""

from collections.abc import Sequence

from torch import nn

from zero_full.shard.group.parameters import FlatParameter


class Site:
    """A module and the parameters that it needs."""

    def __init__(self, name: str, module: nn.Module, flats: Sequence[FlatParameter]) -> None:
        self.name, self.module, self.flats = name, module, list(flats)
        self.reduces = list(flats)  # whose gradients leave when this module's backward is complete
        self.numel = sum(v.layout.total for v in flats)
        self.active: list[Call | None] = []  # whose forward is under way; None: of one that needs nothing
        self.backwards_due = 0  # of calls whose backward is not complete
        self.silent = 0  # calls without gradients in a training forward, which checkpointing may repeat
        self.marked = 0  # calls whose backward tells when it is done
        self.is_used_unseen = False  # by what does not tell when its backward is done
        self.later: int | None = None  # elements that the rest of forward gathers; None: not known yet

    def tells(self) -> bool:
        """Whether all uses are over when no backward is due any more: see [Note: backward done]."""
        is_repeated_once = self.silent == 1 and not self.marked  # by checkpointing that is re-entrant
        return not self.is_used_unseen and (not self.silent or is_repeated_once)

    def forget(self) -> None:
        """No backward of any earlier call is due."""
        self.backwards_due = self.silent = self.marked = 0
        self.is_used_unseen = False


class Call:
    """One call of a site: its parameters are needed in its backward, too."""

    __slots__ = ("needed", "site")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.needed: list[FlatParameter] = []  # while its backward is under way


class Order:
    """The order in which sites are reached in one kind of pass, and how far ahead gathering is."""

    def __init__(self) -> None:
        self.known: list[Site] = []
        self.seen: list[Site] = []
        self.begun = 0  # the first so many sites of the known order have been reached or begun early
        self.ahead = 0  # elements of those that were begun early

    def begin(self) -> bool:
        """Begin a new pass. Returns whether the order of the last one was another than the known one."""
        changed = bool(self.known and self.seen) and self.seen != self.known
        self.known, self.seen = self.seen or self.known, []
        self.begun = self.ahead = 0
        return changed

    def reached(self, site: Site) -> bool:
        """Note that a site is reached. Returns whether the order is the known one so far."""
        place = len(self.seen)
        self.seen.append(site)
        as_known = place < len(self.known) and self.known[place] is site
        if as_known and place < self.begun:
            self.ahead -= site.numel
        else:
            self.begun, self.ahead = place + 1, 0
        return as_known

    def next(self) -> Site | None:
        """The first site that has been neither reached nor begun, if there is one."""
        return self.known[self.begun] if self.begun < len(self.known) else None

    def coming(self) -> Sequence[Site]:
        """All sites that have been neither reached nor begun."""
        return self.known[self.begun :]

    def begin_early(self, site: Site) -> None:
        """Note that the next site is begun before it is reached."""
        self.begun += 1
        self.ahead += site.numel
