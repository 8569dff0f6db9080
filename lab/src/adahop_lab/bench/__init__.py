"""Benchmarks: our samplers and training beside those of other libraries, in turns, on one graph and machine."""

# what is measured unless other methods are asked for
SAMPLING = (
    "graphsage", "graphsage:draw=systematic", "bs", "bs:update=true", "graphsage:policy=tracked",
    "graphsage:policy=tracked:update=true", "graphsage:policy=tracked:draw=systematic",
    "graphsage:policy=tracked:draw=systematic:update=true", "labor:refine=0", "labor", "ladies",
)  # fmt: skip
EPOCH = ("graphsage", "graphsage:draw=systematic", "bs", "graphsage:policy=tracked")
BY_DEGREE = ("graphsage", "bs", "bs:update=true", "graphsage:policy=tracked")
DEGREES = (10, 100, 1_000, 10_000, 100_000)
