"""Which replicas run where, as Serve tells it."""

import asyncio

from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S


async def nodes_of(deployed: Deployed) -> dict[str, set[str]]:
    """Return the names of the nodes of each deployment's replicas."""
    return {
        name: {replica["node_instance_id"] for replica in replicas}
        for name, replicas in (await deployed.running_replicas()).items()
    }


async def ids_of(deployed: Deployed) -> dict[str, set[str]]:
    """Return the ids of each deployment's replicas."""
    return {
        name: {replica["replica_id"] for replica in replicas}
        for name, replicas in (await deployed.running_replicas()).items()
    }


async def scaled(deployed: Deployed, name: str, num_replicas: int) -> None:
    """Deploy with this number of replicas of a deployment; wait until they run."""
    limits = {"min_replicas": num_replicas, "max_replicas": num_replicas}
    deployed.section(name)["autoscaling_config"] |= limits
    await deployed.apply()
    await deployed.settled()
    await until_running(deployed, name, num_replicas)


async def until_running(deployed: Deployed, name: str, num_replicas: int) -> None:
    """Wait until a deployment has this number of running replicas."""
    async with asyncio.timeout(DEADLINE_S):
        while len((await deployed.running_replicas())[name]) != num_replicas:  # noqa: ASYNC110 - Serve's
            await asyncio.sleep(0.1)
