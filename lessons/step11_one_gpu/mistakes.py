"""Wrong answers to lesson 11, for the museum."""

from lessons.museum import Mistake

BLOCKS, SEGMENTS, FITS = "A tensor gets a block", "A block comes out of a segment", "Which free block"
RESTS, GONE = "What is left over", "When a tensor has gone"

MISTAKES = (
    Mistake(
        "rounded-down",
        "block",
        "-(-nbytes // SMALLEST) * SMALLEST",
        "nbytes // SMALLEST * SMALLEST",
        "the block is smaller than the tensor",
        "lookalike",
        BLOCKS,
    ),
    Mistake(
        "one-more-than-needed",
        "block",
        "-(-nbytes // SMALLEST) * SMALLEST",
        "(nbytes // SMALLEST + 1) * SMALLEST",
        "a tensor that fills its block to the last byte gets a larger one",
        "lookalike",
        BLOCKS,
    ),
    Mistake(
        "a-segment-for-each-block",
        "segment",
        "return SMALL_SEGMENT",
        "return size",
        "small tensors share no segment, so each of them has to ask the driver",
        "lookalike",
        SEGMENTS,
    ),
    Mistake(
        "the-largest-in-twenty",
        "segment",
        "return -(-size // OWN_STEP) * OWN_STEP",
        "return -(-size // LARGE_SEGMENT) * LARGE_SEGMENT",
        "up to 20 MiB are lost for each large tensor, and should be less than 2",
        "lookalike",
        SEGMENTS,
    ),
    Mistake(
        "first-that-fits",
        "find",
        "min(fits, key=lambda block: (block.size, block.start), default=None)",
        "next(iter(fits), None)",
        "the first free block is cut up, though a smaller one would do",
        "lookalike",
        FITS,
    ),
    Mistake(
        "small-in-large",
        "find",
        " and block.small == (size <= SMALL)",
        "",
        "small tensors are put into large segments, and no large block stays whole there",
        "lookalike",
        FITS,
    ),
    Mistake(
        "last-of-equal-ones",
        "find",
        "(block.size, block.start)",
        "(block.size, -block.start)",
        "of blocks of one size the one with the highest address is taken",
        "lookalike",
        FITS,
    ),
    Mistake(
        "never-cut",
        "split",
        "rest >= SMALLEST if block.small else rest > SMALL",
        "False",
        "a tensor of 4 MiB has a whole segment of 20",
        "lookalike",
        RESTS,
    ),
    Mistake(
        "always-cut",
        "split",
        "rest >= SMALLEST if block.small else rest > SMALL",
        "rest >= SMALLEST",
        "large segments are cut into crumbs that no large request can use",
        "lookalike",
        RESTS,
    ),
    Mistake(
        "never-merged",
        "merge",
        "        if block.before in self.free:\n"
        "            block = block.before\n"
        "            self.free.remove(block)\n"
        "            self._join(block)\n"
        "        if block.after in self.free:\n"
        "            self.free.remove(block.after)\n"
        "            self._join(block)\n",
        "",
        "freed blocks stay as small as the tensors that had them",
        "lookalike",
        GONE,
    ),
    Mistake(
        "listed-twice",
        "merge",
        "            self.free.remove(block.after)\n",
        "",
        "a block that was joined is still in the list, so two tensors could get the same bytes",
        "lookalike",
        GONE,
    ),
)
