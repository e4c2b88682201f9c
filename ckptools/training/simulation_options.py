"""What `--simulate-world` can be asked for. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from ckptools.errors import UsageError
from ckptools.option import option

# What a world can be simulated with, and the layouts of which every rank writes files of its own.
SIMULATED: dict[str, tuple[str, ...]] = {"fsdp1": ("composer",), "fsdp2": ("composer", "verl")}

# The same with --hollow.
HOLLOW: dict[str, tuple[str, ...]] = {"fsdp2": ("composer", "dcp", "huggingface")}


@dataclass(frozen=True)
class SimulationOptions:
    """A world of which one process writes the files of some ranks."""

    simulate_world: int | None = option(None, "Start no ranks: write the files of --ranks in a world of this size.")
    ranks: str = option("0", "With --simulate-world: whose files, such as 0,137 or 0-3 or all.")
    tiny: bool = option(False, "With --simulate-world: a model of one small block; all 1,024 ranks fit on a laptop.")
    jobs: int = option(1, "With --simulate-world: processes that write.")
    hollow: str | None = option(
        None,
        "With --simulate-world: train nothing, and leave holes in the files where the values would be. Names and "
        "shapes are those of llama3-8b or llama3-70b, or of a JSON file of name to shape.",
    )

    @property
    def ranks_written(self) -> tuple[int, ...]:
        """The ranks that are asked for, in ascending order.

        Raises:
            UsageError: `ranks` is no list of ranks, or one is not in the world.
        """
        world_size = self.simulate_world or 0
        if self.ranks == "all":
            return tuple(range(world_size))
        found = {rank for part in self.ranks.split(",") for rank in self._span(part.strip())}
        if max(found) >= world_size:
            raise UsageError(None, f"--ranks {self.ranks}: there is no rank {max(found)} in a world of {world_size}")
        return tuple(sorted(found))

    def _span(self, part: str) -> range:
        first, dash, last = part.partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(n.isascii() and n.isdigit() and len(n) < 8 for n in numbers) or int(numbers[0]) > int(numbers[1]):
            raise UsageError(None, f"--ranks {self.ranks}: {part!r} is no rank; expected such as 0,137 or 0-3 or all")
        return range(int(numbers[0]), int(numbers[1]) + 1)
