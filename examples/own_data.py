"""Your own data: an edge list, features and labels as files -> one .npz -> training, and predictions by name."""

import os
import tempfile
from pathlib import Path

import numpy as np

import adahop
from adahop.convert import convert

epochs = int(os.environ.get("EPOCHS", "10"))
folder = Path(tempfile.mkdtemp())

# Example files: people who follow each other, mostly within their club.
rng = np.random.default_rng(0)
names = [f"person-{i}" for i in range(600)]
club = rng.integers(3, size=600)
pairs = rng.integers(600, size=(12_000, 2))
pairs = pairs[(club[pairs[:, 0]] == club[pairs[:, 1]]) | (rng.random(len(pairs)) < 0.2)]
(folder / "edges.csv").write_text("src,dst\n" + "\n".join(f"{names[a]},{names[b]}" for a, b in pairs))
(folder / "labels.csv").write_text(
    "id,label\n"
    + "\n".join(f"{name},{['chess', 'choir', 'chemistry'][c]}" for name, c in zip(names, club, strict=True))
)
np.save(folder / "features.npy", np.eye(3)[club] + rng.normal(size=(600, 3)))  # rows in the order of labels.csv

# The same as: adahop convert edges.csv features.npy labels.csv -o graph.npz --ids names --split random:60,20,20
files = [folder / name for name in ("edges.csv", "features.npy", "labels.csv")]
told = convert(files, folder / "graph.npz", ids="names", split="random:60,20,20", undirected=True)
print(f"{told['nodes']:,} nodes, {told['edges']:,} edges, classes {', '.join(told['class_names'])}")

data = adahop.load(folder / "graph.npz")
result = adahop.fit(data, method="bs.m", sizes=(5, 5), hidden=32, epochs=epochs)
print(f"test {data.metric} {result.test:.3f} at epoch {result.best_epoch}")

# The prediction for one person, by name.
out = result.model.inference(result.sampler.graph, data.x).argmax(1)
who = np.load(folder / "graph.npz")["names"]
print(f"{who[7]} is predicted to be in {told['class_names'][out[7]]}, and is in {told['class_names'][data.y[7]]}")
