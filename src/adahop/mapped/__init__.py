"""Beyond memory: graphs and features mapped from files, policy state and histories in files of their own."""

from adahop.mapped.folder import Folder, manifest, opened, read, scratch
from adahop.mapped.graph import MappedGraph

__all__ = ["Folder", "MappedGraph", "manifest", "opened", "read", "scratch"]
