from deployments.replica.own_actor import end_own_actor, own_actor_name


def test_a_process_that_is_no_actor_goes_on_and_has_no_name() -> None:
    end_own_actor()
    assert own_actor_name() is None
