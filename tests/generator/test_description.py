from tests.deployments.tiny_folder import spec


def test_the_root_is_the_hub_repository_and_never_a_path() -> None:
    assert spec("org/model", id="m").root == "org/model"
    assert spec("/srv/models/tiny", id="m").root == "m"
