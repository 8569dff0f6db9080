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
    methods: Annotated[str, option("Methods with commas between, or all; see `adahop list`.")] = "graphsage,bs,bs.m",
    sizes: Annotated[str, option("Neighbours a node draws, input layer first; -1 for all.")] = "10,10",
    layer_sizes: Annotated[
        str, option("Nodes a layer draws, for layer-wise methods; auto: batch size times `sizes`.")
    ] = "auto",
    hidden: Hidden = 64,
    epochs: Epochs = 30,
    lr: Rate = 0.01,
    weight_decay: Decay = 0.0,
    dropout: Annotated[float, option("Share of inputs dropped in training.")] = 0.1,
    batch_size: BatchSize = 256,
    patience: Patience = 0,
    seed: Seed = 0,
    runs: Annotated[int, option("Runs a method, with seeds counted up, the same for all.")] = 3,
    device: Where = "cpu",
    out: Annotated[str, option("Folder for config, metrics, results and the plot.")] = "compare",
    as_json: Annotated[bool, typer.Option("--json", help="Last line on stdout is one JSON object.")] = False,
) -> None:
    """Train with several methods and say which is best, and whether that is more than luck."""
    from adahop_lab.comparing import start

    start(**context.params)
