"""Beyond memory: graphs and features mapped from files, policy state and histories in files of their own."""

from adahop.mapped.data import graph_of, save
from adahop.mapped.folder import Folder, cache, kept, manifest, opened, read, scratch
from adahop.mapped.graph import MappedGraph

__all__ = ["Folder", "MappedGraph", "cache", "graph_of", "kept", "manifest", "opened", "read", "save", "scratch"]
