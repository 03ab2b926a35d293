import pytest

from deployments.generator.description import system_fingerprint
from deployments.model_spec import ModelSpec
from tests.deployments.tiny_folder import spec


def test_replicas_of_one_configuration_have_one_fingerprint() -> None:
    name = system_fingerprint(spec("m"))
    assert name == system_fingerprint(spec("m"))
    assert len(name) == len("fp_0123456789")


@pytest.mark.parametrize(
    "changed",
    [
        spec("n"),
        spec("m", revision="1"),
        spec("m", dtype="bfloat16"),
        spec("m", quantization="int8"),
    ],
)
def test_settings_that_change_the_texts_change_the_fingerprint(changed: ModelSpec) -> None:
    assert system_fingerprint(changed) != system_fingerprint(spec("m"))


def test_the_root_is_the_hub_repository_and_never_a_path() -> None:
    assert spec("org/model", id="m").root == "org/model"
    assert spec("/srv/models/tiny", id="m").root == "m"


def test_settings_that_change_only_the_speed_do_not_change_it() -> None:
    assert system_fingerprint(spec("m", num_threads=3)) == system_fingerprint(spec("m"))
