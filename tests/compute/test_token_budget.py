from deployments.compute.token_budget import GOOD_STEPS, TokenBudget


def note_good_steps(budget: TokenBudget, num_steps: int) -> None:
    for _ in range(num_steps):
        budget.note_good_step()


def test_a_failure_halves_the_step_or_the_budget_whichever_is_less() -> None:
    budget = TokenBudget(100)
    budget.shrink(30)
    assert budget.tokens == 15
    budget.shrink(500)
    assert budget.tokens == 7


def test_at_least_one_token_stays() -> None:
    budget = TokenBudget(100)
    for _ in range(10):
        budget.shrink(3)
    assert budget.tokens == 1


def test_it_doubles_after_good_steps_up_to_the_configured_limit() -> None:
    budget = TokenBudget(100)
    budget.shrink(60)
    note_good_steps(budget, GOOD_STEPS - 1)
    assert budget.tokens == 30
    budget.note_good_step()
    assert budget.tokens == 60
    note_good_steps(budget, 5 * GOOD_STEPS)
    assert budget.tokens == 100


def test_a_failure_in_between_restarts_the_count() -> None:
    budget = TokenBudget(100)
    budget.shrink(100)
    note_good_steps(budget, GOOD_STEPS - 1)
    budget.shrink(40)
    note_good_steps(budget, GOOD_STEPS - 1)
    assert budget.tokens == 20
