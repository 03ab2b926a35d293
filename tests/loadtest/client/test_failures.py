import pytest

from loadtest.failures import kind_of_status
from loadtest.record import ErrorKind


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, None),
        (204, None),
        (301, ErrorKind.MALFORMED),
        (307, ErrorKind.MALFORMED),
        (400, ErrorKind.HTTP_4XX),
        (422, ErrorKind.HTTP_4XX),
        (429, ErrorKind.HTTP_429),
        (500, ErrorKind.HTTP_5XX),
        (503, ErrorKind.HTTP_5XX),
    ],
)
def test_a_status_is_one_kind(status: int, kind: ErrorKind | None) -> None:
    assert kind_of_status(status) is kind
