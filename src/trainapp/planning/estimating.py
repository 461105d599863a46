"""The planner of a configuration that cannot be traced."""

from trainapp.assembly.components import Components
from trainapp.config.schema import Config
from trainapp.planning.real_steps import MARGIN, RealSteps
from trainapp.planning.sizes import Planner
from trainapp.planning.traced_run import Trace
from trainapp.planning.ways import FIRST, Way


class EstimatingPlanner(Planner):
    """Estimates from steps that are run for real, of one process.

    begins_run: whether a run begins with the size that fits, which then leaves MARGIN of the limit.
    """

    def __init__(self, config: Config, components: Components, begins_run: bool):
        super().__init__(config, components)
        self.steps = RealSteps(config, components)
        if begins_run:
            self.limit = round((1 - MARGIN) * self.limit)

    def at(self, size: int, eval_size: int, way: Way = FIRST) -> Trace:
        """As `Planner.at`; there is one way, that of the values."""
        return self.steps.trace(size, eval_size, self.workload.share)

    def at_rank(self, rank: int, size: int, eval_size: int, way: Way = FIRST) -> Trace:
        """There is one rank."""
        return self.at(size, eval_size, way)
