"""`adahop compare`: several methods on one data set, the same seeds for all, a table and a plot."""

from __future__ import annotations

from typing import Annotated

import typer

from adahop.cli.commands import (
    Arch,
    BatchSize,
    DataSet,
    Decay,
    Epochs,
    Hidden,
    Model,
    Patience,
    Rate,
    Seed,
    Where,
    option,
)


def compare(
    context: typer.Context,
    dataset: DataSet = "digits",
    model: Model = "gcn",
    arch: Arch = "residual",
    methods: Annotated[str, option("Separated by commas, or all; see `adahop list`.")] = "graphsage,bs,bs.m",
    sizes: Annotated[str, option("Neighbours per node, input layer first; -1 for all.")] = "10,10",
    layer_sizes: Annotated[
        str, option("Nodes per layer, for layer-wise methods; auto: batch size times `sizes`.")
    ] = "auto",
    hidden: Hidden = 64,
    epochs: Epochs = 30,
    lr: Rate = 0.01,
    weight_decay: Decay = 0.0,
    dropout: Annotated[float, option("Fraction of inputs dropped in training.")] = 0.1,
    batch_size: BatchSize = 256,
    patience: Patience = 0,
    seed: Seed = 0,
    runs: Annotated[int, option("Runs per method, with consecutive seeds, the same for all.")] = 3,
    device: Where = "cpu",
    out: Annotated[str, option("Folder for config, metrics, results and the plot.")] = "compare",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line on stdout.")] = False,
) -> None:
    """Train with several methods and test whether the best one is significantly better."""
    from adahop_lab.comparing import start

    start(**context.params)
