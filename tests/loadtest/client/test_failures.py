from loadtest.client.failures import kind_of_status
from loadtest.results.record import ErrorKind
from tests.offenders import for_each


@for_each(
    (200, None),
    (204, None),
    (301, ErrorKind.MALFORMED),
    (307, ErrorKind.MALFORMED),
    (400, ErrorKind.HTTP_4XX),
    (422, ErrorKind.HTTP_4XX),
    (429, ErrorKind.HTTP_429),
    (500, ErrorKind.HTTP_5XX),
    (503, ErrorKind.HTTP_5XX),
)
def test_each_status_has_one_kind_of_error(status: int, kind: ErrorKind | None) -> None:
    assert kind_of_status(status) is kind
