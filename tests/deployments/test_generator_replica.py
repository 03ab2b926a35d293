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
import deployments.generator_replica
"""


def test_a_generator_s_replica_is_imported_without_the_packages_of_the_embedded_engine() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_WITHOUT], check=True, timeout=120)
