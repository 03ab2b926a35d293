"""Which trace is taken: passes whose results are only whether they are the model's."""

import logging
from collections.abc import Callable, Sequence

import pytest
import torch

from deployments.compute.traced_model.kept_trace import Trace
from deployments.compute.traced_model.traced_graph import NotTraceableError
from deployments.compute.traced_model.traced_pass import TracedPass, find_faithful
from tests.failing import failing

PLAIN, FUSED = (torch.fx.GraphModule({}, torch.fx.Graph()) for _ in range(2))


class Pass(TracedPass):
    """A pass that says whether it was kept; its trace is a stand-in, and no file is there."""

    def __init__(self, *, was_kept: bool, is_fused: bool) -> None:
        trace = Trace(PLAIN, FUSED if is_fused else None, None)
        super().__init__(lambda: trace, None, reads_kept=True)
        self.was_kept = was_kept
        self.num_kept = 0

    def keep(self) -> None:
        self.num_kept += 1


class Opener:
    """Opens passes, and judges each by the next of some verdicts; an error is raised."""

    def __init__(
        self, verdicts: Sequence[bool | Exception], *, is_on_disk: bool, is_fused: bool = True
    ) -> None:
        self.opened: list[Pass] = []
        self._verdicts = [*verdicts]
        self._is_on_disk = is_on_disk
        self._is_fused = is_fused

    def open(self, *, reads_kept: bool) -> Pass:
        self.opened.append(Pass(was_kept=self._is_on_disk and reads_kept, is_fused=self._is_fused))
        return self.opened[-1]

    def is_faithful(self, traced: Pass) -> bool:
        assert traced is self.opened[-1]
        verdict = self._verdicts.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    def find(self) -> Pass | None:
        found = find_faithful(self.open, self.is_faithful, "sums")
        assert not self._verdicts
        return found


def test_a_faithful_trace_from_disk_is_taken_and_not_kept_again() -> None:
    opener = Opener([True], is_on_disk=True)
    found = opener.find()
    assert found is not None
    assert found.was_kept
    assert opener.opened == [found]
    assert found.num_kept == 0


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (False, "the trace on disk gives other sums; the model is traced again"),
        (RuntimeError("no such operator"), "the trace on disk fails; the model is traced again"),
    ],
)
def test_a_trace_from_disk_that_differs_or_fails_is_made_again_and_kept(
    verdict: bool | Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    opener = Opener([verdict, True], is_on_disk=True)
    found = opener.find()
    assert found is not None
    assert found is opener.opened[1]
    assert not found.was_kept
    assert [each.num_kept for each in opener.opened] == [0, 1]
    assert caplog.messages == [said]


def test_a_trace_whose_fused_operators_differ_runs_without_them_and_is_not_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opener = Opener([False, True], is_on_disk=False)
    found = opener.find()
    assert found is not None
    assert not found.is_fused
    assert found.num_kept == 0
    assert caplog.messages == ["operators are not fused: the sums would differ"]


@pytest.mark.parametrize(("is_fused", "verdicts"), [(True, [False, False]), (False, [False])])
def test_no_trace_is_taken_that_differs_without_fused_operators(
    is_fused: bool, verdicts: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    opener = Opener(verdicts, is_on_disk=False, is_fused=is_fused)
    with caplog.at_level(logging.DEBUG):
        assert opener.find() is None
    assert [each.num_kept for each in opener.opened] == [0]
    assert not caplog.messages


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_what_a_new_trace_raises_is_not_hidden(is_on_disk: bool) -> None:
    error = RuntimeError("a kernel's bug")
    verdicts = [error, error] if is_on_disk else [error]
    with pytest.raises(RuntimeError, match="a kernel's bug"):
        Opener(verdicts, is_on_disk=is_on_disk).find()


def test_a_model_that_can_not_be_traced_is_not_tried() -> None:
    is_faithful: Callable[[Pass], bool] = failing(AssertionError("tried"))
    with pytest.raises(NotTraceableError, match="it branches"):
        find_faithful(failing(NotTraceableError("it branches")), is_faithful, "sums")
