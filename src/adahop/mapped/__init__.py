"""Graphs and features in files that are mapped into memory, for data sets larger than memory."""

from adahop.mapped.data import graph_of, save
from adahop.mapped.folder import Folder, cache_path, cached_arrays, manifest, open_array, read, scratch
from adahop.mapped.graph import MappedGraph

__all__ = [
    "Folder",
    "MappedGraph",
    "cache_path",
    "cached_arrays",
    "graph_of",
    "manifest",
    "open_array",
    "read",
    "save",
    "scratch",
]
