"""Sites: modules with parameters that are gathered for use, their calls, and the order of these calls."""

from collections.abc import Sequence

from torch import nn

from zero_full.shard.group.parameter_group import ParameterGroup


class Site:
    """A module and the parameters that it needs."""

    def __init__(self, name: str, module: nn.Module, groups: Sequence[ParameterGroup]) -> None:
        self.name, self.module, self.groups = name, module, list(groups)
        self.reduces = list(groups)  # groups to reduce when this module's backward is complete
        self.numel = sum(group.layout.total for group in groups)
        self.active: list[Call | None] = []  # calls in forward, a stack; None: a call that gathers nothing
        self.backwards_due = 0  # calls with a mark that have not completed backward
        self.silent = 0  # calls under no_grad in a training forward, which checkpointing may recompute
        self.marked = 0  # calls with a mark that runs when their backward is done
        self.is_used_unseen = False  # the parameters have a use without a mark
        self.later: int | None = None  # elements that the rest of forward gathers; None: not known yet

    def tells(self) -> bool:
        """Return whether marks cover all uses of the parameters: see [Note: backward done]."""
        is_repeated_once = self.silent == 1 and not self.marked  # by re-entrant checkpointing
        return not self.is_used_unseen and (not self.silent or is_repeated_once)

    def forget(self) -> None:
        """Expect no backward of earlier calls."""
        self.backwards_due = self.silent = self.marked = 0
        self.is_used_unseen = False


class Call:
    """One forward call of a site, which needs the parameters again in its backward."""

    __slots__ = ("needed", "site")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.needed: list[ParameterGroup] = []  # groups that its running backward uses


class Order:
    """The recorded order of sites in one kind of pass, and the position of the prefetch in it."""

    def __init__(self) -> None:
        self.known: list[Site] = []  # order of the last pass
        self.seen: list[Site] = []  # order of this pass so far
        self.begun = 0  # index in `known` of the first site that was neither reached nor prefetched
        self.ahead = 0  # elements that were prefetched and not reached yet

    def begin(self) -> bool:
        """Begin a new pass. Returns whether the last pass had another order than the one before it."""
        changed = bool(self.known and self.seen) and self.seen != self.known
        self.known, self.seen = self.seen or self.known, []
        self.begun = self.ahead = 0
        return changed

    def reached(self, site: Site) -> bool:
        """Note that a site is reached. Returns whether this site is the one that the known order has here."""
        place = len(self.seen)
        self.seen.append(site)
        as_known = place < len(self.known) and self.known[place] is site
        if as_known and place < self.begun:
            self.ahead -= site.numel
        else:
            self.begun, self.ahead = place + 1, 0
        return as_known

    def coming(self) -> Sequence[Site]:
        """Return all sites of the known order that were neither reached nor prefetched."""
        return self.known[self.begun :]

    def begin_early(self, site: Site) -> None:
        """Note that the next site is prefetched."""
        self.begun += 1
        self.ahead += site.numel
