"""What tests of light sleep do with a replica, whatever its model does."""

from deployments.plan.replica_report import SleepState
from deployments.replica.light_sleep import LightSleeper
from tests.deadline import until


class Sleepy:
    """A replica that falls asleep when told to, and notes that it would end its process."""

    _sleeper: LightSleeper
    ends = 0

    def _note_end(self) -> None:
        self.ends += 1

    async def look(self) -> None:
        """Do what follows an hour without a request, and wait until that is over."""
        self._sleeper._look()
        await until(lambda: self._sleeper._change is None)

    async def fall_asleep(self) -> None:
        """Sleep as after an hour without a request."""
        await until(lambda: not self._sleeper._users and self._sleeper._change is None)
        await self.look()
        assert self._sleeper.state is SleepState.ASLEEP
