from deployments.own_actor import end_own_actor


def test_a_process_that_is_no_actor_goes_on() -> None:
    end_own_actor()
