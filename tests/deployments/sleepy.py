"""What tests of light sleep do with a replica, whatever its model does."""

from pathlib import Path

from deployments.plan.replica_report import SleepState
from deployments.replica.light_sleep import LightSleeper
from deployments.replica.own_turn import OwnTurn, TurnLease
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


class Device:
    """A device whose lease and turns a replica has; other models are only names."""

    def __init__(self, path: Path) -> None:
        self.holder = "tiny"
        self.lease = TurnLease(path)
        self.other = TurnLease(path)
        self.turn = OwnTurn(self.lease, "tiny", lambda: self.holder, 0.001)

    def close(self) -> None:
        self.lease.close()
        self.other.close()
