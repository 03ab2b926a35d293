import subprocess
import sys

from tests.deployments.test_generator_replica import IMPORT_WITHOUT


def test_a_pooler_s_replica_is_imported_without_the_packages_of_the_embedded_engine() -> None:
    script = IMPORT_WITHOUT.replace("generator_replica", "pooler_replica")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
