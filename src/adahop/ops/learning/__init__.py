"""What is kept from step to step: bandits' weights and their sums, tracked norms, rows of a history."""

from adahop.ops.learning import cpu, reference
from adahop.ops.learning.reference import Sight, Weights
from adahop.ops.registry import register

__all__ = ["Sight", "Weights", "exp3", "grow", "push", "track"]

CUDA = "adahop.ops.learning.cuda"
grow = register("grow", reference=reference.grow, cpu=cpu.grow, cuda=f"{CUDA}:grow")
exp3 = register("exp3", reference=reference.exp3, cpu=cpu.exp3, cuda=f"{CUDA}:exp3")
track = register("track", reference=reference.track, cpu=cpu.track, cuda=f"{CUDA}:track")
push = register("push", reference=reference.push, cuda=f"{CUDA}:push")
