"""Reports of replicas that never ran."""

from deployments.contract.claims import TenantService
from deployments.contract.telemetry.memory_report import (
    MemoryHistory,
    MemoryReport,
    MemoryUse,
    MemoryWarning,
    Watched,
)
from deployments.plan.replica_report import (
    MeasuredMemory,
    MemoryPlan,
    ReplicaReport,
    ReplicaState,
    WaitReason,
    Waits,
    WorkCounts,
)

GIB = 2**30
NOW_S = 1_700_000_000.0


def gpu_report(replica_id: str = "r", num_samples: int = 3) -> ReplicaReport:
    """Return the report of a replica with half of a GPU that is short of memory."""
    grown = [(20 + i * 20 / num_samples) for i in range(num_samples)]
    history = MemoryHistory(
        tuple(NOW_S + i for i in range(num_samples)),
        tuple(int((gib + 30) * GIB) for gib in grown),
        tuple(int((gib + 1) * GIB) for gib in grown),
        tuple(int((gib - 2) * GIB) for gib in grown),
        tuple(int(gib * GIB) for gib in grown),
    )
    use = MemoryUse(80 * GIB, 70 * GIB, 40 * GIB, 36 * GIB, 39 * GIB, 38 * GIB)
    warning = MemoryWarning(Watched.SHARE, 38 * GIB, 40 * GIB, NOW_S + num_samples // 2)
    return ReplicaReport(
        replica_id=replica_id,
        node="10.0.0.1",
        process_id=7,
        device="A GPU",
        share=0.5,
        state=ReplicaState.HEALTHY,
        state_unix_s=NOW_S,
        ready_unix_s=NOW_S,
        plan=MemoryPlan(
            *(36 * GIB, 14 * GIB, GIB, GIB, 20 * GIB, 4096, 2048, 8, 512),
            MeasuredMemory(14 * GIB, GIB // 4, 35 * GIB, None),
        ),
        memory=MemoryReport(use, 40 * GIB, history, (warning,)),
        work=WorkCounts(
            *(3, 1, 0.25, 2, 1, 100, 40),
            waits=Waits({WaitReason.MEMORY: 1}, 2.5, 120.0),
            tenants=(TenantService("alice", 2.0, 1, 900.0), TenantService("bob", 1.0, 0, 300.0)),
        ),
        attention="attention reads extents by length (flash attention)",
    )


def cpu_report(replica_id: str = "c") -> ReplicaReport:
    """Return the report of a classifier on a CPU that has just begun."""
    history = MemoryHistory((NOW_S,), (4 * GIB,), (GIB // 2,))
    use = MemoryUse(8 * GIB, 4 * GIB, GIB // 2, peak_bytes=GIB)
    return ReplicaReport(
        replica_id=replica_id,
        node="127.0.0.1",
        process_id=8,
        device="CPU of 2 core(s)",
        share=1.0,
        state=ReplicaState.FAILING,
        state_unix_s=NOW_S + 5,
        ready_unix_s=NOW_S,
        plan=MemoryPlan(14 * GIB, GIB // 4, GIB, 0, 0, 0, 1280, 1, 2048),
        memory=MemoryReport(use, None, history),
        work=WorkCounts(1, 0),
    )
