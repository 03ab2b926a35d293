import subprocess
import sys

ABSENT = ("jmespath", "llvmlite", "matplotlib", "numba")
"""Packages that an environment with vLLM lacks, or has in another version."""

IMPORT_WITHOUT = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import deployments.generator_replica, deployments.pooler_replica
"""


def test_replicas_of_any_engine_are_imported_without_the_packages_of_the_embedded_one() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_WITHOUT], check=True, timeout=120)
