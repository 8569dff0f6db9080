"""The commands and their flags. Nothing here imports torch, so that help is fast: a call imports what it needs.

A command passes its flags on as they were given, `context.params`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer


def option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, show_default=True, **more)


# flags of several commands
DataSet = Annotated[str, option("A name of `adahop list`, a .npz or .pt path, or synthetic:N,E,F,C.")]
Model = Annotated[str, option("gcn, sage, gat, gatv2 or geniepath; heterogeneous graphs: rgcn, rgat or hgt.")]
Arch = Annotated[
    str, option("residual: every layer adds a linear map of the input; plain: stacked layers; gcnii (gcn): for depth.")
]
Hidden = Annotated[int, option("Width of the hidden layers.")]
Rate = Annotated[float, option("Adam's learning rate.")]
Decay = Annotated[float, option("L2 penalty.")]
Epochs = Annotated[int, option("Passes over the training nodes.")]
BatchSize = Annotated[int, option("Training nodes per step.")]
Patience = Annotated[int, option("Stop after this many epochs without a better validation score; 0: never.")]
Seed = Annotated[int, option("Seed of the first run.")]
Where = Annotated[str, option("cpu or cuda.")]


def train(
    context: typer.Context,
    dataset: DataSet = "digits",
    model: Model = "gcn",
    arch: Arch = "residual",
    method: Annotated[str, option("How neighbours are sampled; see `adahop list`.")] = "adahop",
    sizes: Annotated[str, option("Neighbours (or nodes) per layer, input layer first; -1 for all.")] = "10,10",
    hidden: Hidden = 64,
    epochs: Epochs = 30,
    lr: Rate = 0.01,
    weight_decay: Decay = 0.0,
    dropout: Annotated[float, option("Fraction of inputs dropped in training.")] = 0.1,
    batch_size: BatchSize = 256,
    patience: Patience = 0,
    prefetch: Annotated[int, option("Batches drawn ahead in a thread; feedback is that many batches late.")] = 0,
    estimator: Annotated[
        str | None,
        option(
            "plain, history, snapshot, scores, exact, exact+history, exact+snapshot, exact+scores, exact+sums; "
            "default the method's own."
        ),
    ] = None,
    noise: Annotated[
        str,
        option(
            "Share of the sampling noise that a control variate leaves, 0 to 1, one number or one per layer; auto: "
            "compare 0 and uniform draws of 2, of many also of 10, on validation nodes, and go on with the best."
        ),
    ] = "auto",
    judged: Annotated[
        int | None, option("Evaluate this many nodes per split, without a pass over the whole graph; default all.")
    ] = None,
    average: Annotated[
        float, option("Evaluate a running average of the weights; the fraction kept per step; 0: none.")
    ] = 0.0,
    alpha: Annotated[
        float | None, option("gcn, --arch gcnii: share of the first layer's input in every layer; default .1.")
    ] = None,
    theta: Annotated[float | None, option("gcn, --arch gcnii: W of layer l has weight theta / l; default .5.")] = None,
    norm: Annotated[str | None, option("gcn: row (default) or sym, how weights are normalised.")] = None,
    activation: Annotated[str | None, option("relu, elu or tanh instead of the architecture's own.")] = None,
    heads: Annotated[int | None, option("gat, gatv2, rgat, hgt: number of attention heads; default 4.")] = None,
    conv: Annotated[str | None, option("rgcn: convolution of a relation, gcn (default) or sage.")] = None,
    bases: Annotated[
        int | None, option("rgcn: matrices of relations are mixtures of this many; 0: one matrix per relation.")
    ] = None,
    blocks: Annotated[
        int | None, option("rgcn: block-diagonal matrices with this many blocks; 0: full matrices.")
    ] = None,
    edges: Annotated[int | None, option("Number of edge features that the model reads; 0: none; default all.")] = None,
    score: Annotated[str | None, option("gat: activation of the scores, leaky_relu (default) or relu.")] = None,
    attention: Annotated[
        str | None,
        option(
            "gat, gatv2, geniepath, rgat: normalisation over a sample, self-normalised (default), paper or softmax."
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        option("An option of the method, like eta=0.2; may be repeated.", "--option", metavar="NAME=VALUE"),
    ] = None,
    seed: Seed = 0,
    runs: Annotated[int, option("Number of runs, with consecutive seeds.")] = 1,
    device: Where = "cpu",
    capture: Annotated[
        bool | None, option("On a GPU: run the step as one CUDA graph; default: where possible.")
    ] = None,
    half: Annotated[bool, option("On a GPU: features and history in half precision.")] = False,
    features: Annotated[
        str,
        option("How features are kept: float32, bfloat16 (half the bytes), or auto: sparse where most entries are 0."),
    ] = "auto",
    tf32: Annotated[bool, option("On a GPU: matrix products in TF32.")] = True,
    cache: Annotated[
        float | None, option("On a GPU: keep features in host memory, with this fraction of rows on the device.")
    ] = None,
    state: Annotated[
        str | None, option("Folder for policy state and histories, kept in files instead of memory.")
    ] = None,
    partition: Annotated[str | None, option("Under torchrun, each process owns a part: range or metis.")] = None,
    log_variance: Annotated[int, option("Measure every layer's variance every this many steps; 0: never.")] = 0,
    out: Annotated[str | None, option("Folder for config, metrics and the best checkpoint.")] = None,
    checkpoint_every: Annotated[
        str, option("With --out, checkpoint after this many steps, or 30s; auto: at most a twentieth of the time.")
    ] = "auto",
    resume: Annotated[
        str | None, option("Continue the run in this folder with the settings of its config.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line on stdout.")] = False,
) -> None:
    """Train a model with sampled neighbours; report the test score of the best validation epoch."""
    from adahop.cli.train import start

    start(context)


def variance(
    context: typer.Context,
    dataset: DataSet = "digits",
    model: Model = "gcn",
    arch: Arch = "residual",
    methods: Annotated[
        str, option("Separated by commas; with options, like graphsage:policy=tracked:estimator=exact+history.")
    ] = "graphsage,bs,bs.m",
    sizes: Annotated[str, option("Neighbours per node, input layer first; layer-wise: times the batch size.")] = "5,5",
    ks: Annotated[str | None, option("Several numbers, each used for all layers in turn, like 1,2,5,10.")] = None,
    hidden: Hidden = 64,
    epochs: Annotated[int, option("Passes over the training nodes before the measurement.")] = 10,
    lr: Rate = 0.01,
    dropout: Annotated[float, option("Fraction of inputs dropped in training; none while measuring.")] = 0.1,
    batch_size: BatchSize = 256,
    nodes: Annotated[int, option("Training nodes to measure at.")] = 256,
    repeats: Annotated[int, option("Draws for each measurement.")] = 20,
    seed: Seed = 0,
    runs: Annotated[int, option("Runs per method, with consecutive seeds, the same for all.")] = 1,
    device: Where = "cpu",
    out: Annotated[str | None, option("Folder for the rows and plots.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, method and layer, on stdout.")
    ] = False,
) -> None:
    """Measure E|estimate - truth|^2 of every layer's sum, relative to uniform draws and to the oracle."""
    from adahop.cli.variance import start

    start(**context.params)


def advise(
    context: typer.Context,
    dataset: Annotated[str, option("A name of `adahop list`, a .npz or .pt path, or planted:N,E,F,C.")] = "digits",
    minutes: Annotated[float, option("How long it may take, roughly.")] = 5.0,
    model: Model = "gcn",
    arch: Arch = "residual",
    layers: Annotated[int, option("Layers of the model.")] = 2,
    hidden: Hidden = 64,
    lr: Rate = 0.01,
    dropout: Annotated[float, option("Fraction of inputs dropped in training.")] = 0.1,
    batch_size: BatchSize = 256,
    seed: Annotated[int, option("Seed of every candidate.")] = 0,
    device: Where = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line on stdout.")] = False,
) -> None:
    """Compare a few methods on a graph's validation nodes and recommend one command."""
    from adahop.cli.advise import start

    start(**context.params)


def listing(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """List the methods, models and data sets."""
    from adahop.cli.listing import start

    start(as_json)


def convert(
    context: typer.Context,
    source: Annotated[
        list[str],
        typer.Argument(
            help="edges features labels; or an OGB folder; or a .pt; or for a heterogeneous graph NAME=FILE ..."
        ),
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="The .npz to write, or with --mmap the folder.")],
    split: Annotated[
        str | None,
        typer.Option(
            help="random:60,20,20 (default where the source has none), or a folder with train.csv, val.csv, test.csv."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a random split.")] = 0,
    ids: Annotated[
        str,
        typer.Option(help="numbers: 0, 1, ..., the rows of the features; names: any words, those of the labels file."),
    ] = "numbers",
    undirected: Annotated[bool, typer.Option("--undirected", help="Add the reverse of every edge.")] = False,
    name: Annotated[str | None, typer.Option(help="The data set's name; default the file's.")] = None,
    mmap: Annotated[bool, typer.Option("--mmap", help="Write a folder that is mapped, for large graphs.")] = False,
    loops: Annotated[bool, typer.Option("--loops", help="With --mmap: store A + I, which gcn and gat read.")] = False,
) -> None:
    """Check the files of a graph and write them as one .npz for `--dataset`.

    Edges: .csv, .tsv, .txt (also .gz) or .parquet with columns src, dst and optionally weight, header or not; columns
    whose names begin with attr are features of the edges.
    Features: .npy, scipy's .npz or a table. Labels: .npy or a table with a label, or id and label, per row.
    A heterogeneous graph: edge__SRC__REL__DST=edges.csv for each relation, x__TYPE=features.csv and y__TYPE=labels.csv.
    """
    from adahop.cli.convert import start

    start(**context.params)


def partition(
    dataset: Annotated[str, typer.Argument(help="A name of `adahop list`, a file, or a folder of `convert --mmap`.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder to write.")],
    parts: Annotated[int, typer.Option(help="Number of parts, one per process.")] = 2,
    how: Annotated[str, typer.Option(help="range: nodes as they are numbered; metis: neighbours together.")] = "metis",
) -> None:
    """Cut a data set into parts, each with its nodes' in-edges, features and labels, for `train --partition`."""
    from adahop.cli.partition import start

    start(dataset, out, parts, how)
