"""One colour, one meaning, in all that is drawn.

The kinds are in Okabe and Ito's colours, which colour-blind readers tell apart. What is only compared, runs
and ranks and stages, has four others, and beside them always a mark, a dash or a place of its own. The site's
style sheets have the same colours; a test compares.
"""

PARAMETERS = "#0072B2"  # and what carries them: all-gather, broadcast, copies up from the host
GRADIENTS = "#E69F00"  # and what carries them: all-reduce, reduce-scatter, all-to-all, copies down
OPTIMIZER = "#009E73"  # and what carries its state: reads from disk, writes to it
MASTER = "#56B4E9"  # the optimizer's fp32 copy of the parameters, where it is drawn by itself
ACTIVATIONS = "#CC79A7"
ALARM = "#D55E00"  # skipped, wrong, waiting
AWAY, DISK = "#808080", "#B3A27D"  # what waits on the host, in files
FORWARD, BACKWARD, STEP = "#CCCCCC", "#999999", "#EEEEEE"  # arithmetic
MEANINGS = {
    "parameters": PARAMETERS,
    "gradients": GRADIENTS,
    "optimizer": OPTIMIZER,
    "master": MASTER,
    "activations": ACTIVATIONS,
    "alarm": ALARM,
    "host": AWAY,
    "disk": DISK,
    "forward": FORWARD,
    "backward": BACKWARD,
    "step": STEP,
}
VIOLET, BROWN, OLIVE, SLATE = SERIES = (
    "#8F6BC9",
    "#B5763A",
    "#948C1A",
    "#6F8FA0",
)  # compared
OWNERS = ("#0072B2", "#8CC3E3", "#3D97CC", "#C6E2F2")  # parameters, in the tint of the rank that owns them
INK, PAPER = "#111111", "#ffffff"  # letters on a coloured box, whatever the page's colours are


def ink_on(colour: str) -> str:
    """The colour of letters on a box of this colour."""
    return PAPER if colour == PARAMETERS else INK
