"""`adahop bench`: how fast sampling and training are here, beside other libraries."""

from __future__ import annotations

from typing import Annotated

import typer

from adahop.cli.commands import option
from adahop_lab.bench import BY_DEGREE, DEGREES, EPOCH, SAMPLING

bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory compared with other libraries, taking turns.")

GRAPH = (
    "rmat:N,E (heterogeneous with ,types=3,relations=6), star:DEGREE, a name of `adahop list`, or a .npz or .pt path."
)
PARTS = "Separated by commas; options after colons, like bs:update=true or graphsage:policy=tracked:draw=systematic."
PEERS = "Libraries to compare with, or one of their samplers, like dgl:uniform:ids=int32; none: no comparison."
CLOCK = "wall; or cpu: processor seconds, for one thread on a machine that others use."
AS_JSON = typer.Option("--json", help="One JSON object per line on stdout.")


@bench.command()
def sampling(
    context: typer.Context,
    graph: Annotated[str, option(GRAPH)] = "rmat:200000,10000000",
    sizes: Annotated[str, option("Neighbours per node, input layer first; layer-wise: times the batch.")] = "10,10",
    batch_size: Annotated[int, option("Seeds per batch.")] = 1024,
    threads: Annotated[str, option("Numbers of threads, each measured in turn.")] = "1",
    methods: Annotated[str, option(PARTS)] = ",".join(SAMPLING),
    peers: Annotated[str, option(PEERS)] = "dgl,pyg",
    rounds: Annotated[int, option("Rounds per method.")] = 5,
    seconds: Annotated[float, option("Least duration of one turn.")] = 0.25,
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
    clock: Annotated[str, option(CLOCK)] = "wall",
    out: Annotated[str | None, option("Folder for sampling.jsonl and a plot.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Edges sampled and relabelled per second, and the ratio to every other library that can be imported."""
    from adahop_lab.bench import work

    work.sampling(**context.params)


@bench.command()
def epoch(
    context: typer.Context,
    graph: Annotated[str, option("A name of `adahop list`, a .npz or .pt path, or synthetic:N,E,F,C.")] = "digits",
    sizes: Annotated[str, option("Neighbours per node, input layer first.")] = "10,10",
    batch_size: Annotated[int, option("Training nodes per step.")] = 256,
    threads: Annotated[str, option("Numbers of threads, each measured in turn.")] = "1",
    methods: Annotated[str, option(PARTS)] = ",".join(EPOCH),
    peers: Annotated[str, option("dgl, dgl:graphconv, dgl:sum-first; none: no comparison.")] = "dgl",
    rounds: Annotated[int, option("Epochs measured per method.")] = 3,
    arch: Annotated[str, option("plain or residual.")] = "residual",
    hidden: Annotated[int, option("Width of the hidden layers.")] = 256,
    prefetch: Annotated[int, option("Batches that adahop's loader draws ahead in a thread.")] = 0,
    device: Annotated[str, option("cpu, or cuda: then captured and eager, and pyg among the peers.")] = "cpu",
    model: Annotated[str, option("gcn, sage, gat or geniepath.")] = "gcn",
    dropout: Annotated[float, option("Dropout of the models; `adahop train` has .1.")] = 0.0,
    half: Annotated[bool, option("On a GPU: features and history in half precision.")] = False,
    clock: Annotated[str, option(CLOCK)] = "wall",
    out: Annotated[str | None, option("Folder for epoch.jsonl and a plot.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Seconds per epoch of a GCN, with adahop and with the same model on DGL's sampler and blocks."""
    from adahop_lab.bench import work

    work.epoch(**context.params)


@bench.command()
def degrees(
    context: typer.Context,
    graph: Annotated[str, option("star, or rmat:N,E whose nodes are taken by degree.")] = "star",
    degrees: Annotated[str, option("Degrees of the targets.")] = ",".join(map(str, DEGREES)),
    size: Annotated[int, option("Neighbours per target.")] = 5,
    batch_size: Annotated[int, option("Targets per batch.")] = 256,
    threads: Annotated[int, option("Threads.")] = 1,
    methods: Annotated[str, option(PARTS)] = ",".join(BY_DEGREE),
    rounds: Annotated[int, option("Rounds per method.")] = 5,
    seconds: Annotated[float, option("Least duration of one turn.")] = 0.1,
    clock: Annotated[str, option(CLOCK)] = "wall",
    out: Annotated[str | None, option("Folder for degrees.jsonl and a plot.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Microseconds per batch of one layer, by the degree of its targets."""
    from adahop_lab.bench import work

    work.degrees(**context.params)


@bench.command()
def inference(
    context: typer.Context,
    graph: Annotated[str, option(GRAPH)] = "rmat:200000,10000000",
    features: Annotated[int, option("Columns of x.")] = 64,
    hidden: Annotated[int, option("Width of the hidden layers.")] = 64,
    outputs: Annotated[int, option("Columns of the output.")] = 64,
    arch: Annotated[str, option("plain or residual.")] = "plain",
) -> None:
    """Peak memory of a GCN's pass over the whole graph, relative to graph, features and output; one JSON line."""
    from adahop_lab.bench import work

    work.inference(**context.params)


@bench.command()
def setup(
    context: typer.Context,
    graph: Annotated[
        str, option("A data set with features, like synthetic:N,E,F,C.")
    ] = "synthetic:200000,10000000,100,10",
    method: Annotated[str, option("A name of `adahop list`.")] = "adahop",
    sizes: Annotated[str, option("Neighbours per node, input layer first.")] = "10,10",
    hidden: Annotated[int, option("Width of the hidden layers.")] = 64,
    batch_size: Annotated[int, option("Training nodes per step.")] = 1024,
    threads: Annotated[int, option("Threads.")] = 2,
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
    clock: Annotated[str, option(CLOCK)] = "wall",
) -> None:
    """Seconds from loaded data to the first step, by part, without and with compiled kernels; JSON lines."""
    from adahop_lab.bench import work

    work.setup(**context.params)
