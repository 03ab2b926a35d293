from models.training.detector.detector import Verdict
from models.training.detector.document import Source
from models.training.detector.evaluate import confusion, figure, figures_by, sample_of, split
from models.training.detector.pieces import MAX_CHARS, Piece

PEOPLE = Piece("Written by a person, all of it.", Source.TOPIC, None, False)
CHAT = Piece("Written by a model, all of of it.", Source.ANSWER, 0.8, False)
VERDICTS = [Verdict(PEOPLE, 0.2), Verdict(PEOPLE, 0.9), Verdict(CHAT, 0.7), Verdict(CHAT, 0.51)]


def test_a_figure_counts_the_right_ones() -> None:
    assert figure(VERDICTS) == {"share": 0.75, "right": 3, "asked": 4}


def test_the_confusion_table_counts_every_piece_once() -> None:
    assert confusion(VERDICTS) == {
        "written by human": {"called human": 1, "called pydoc-chat": 1},
        "written by pydoc-chat": {"called human": 0, "called pydoc-chat": 2},
    }


def test_figures_of_each_kind_leave_out_what_has_none() -> None:
    kinds = figures_by(VERDICTS, lambda it: None if it.temperature is None else "0.8")
    assert kinds == {"0.8": {"share": 1.0, "right": 2, "asked": 2}}


def test_a_long_text_is_split_without_losing_a_word() -> None:
    text = "A sentence of some words. " * 60 + "x" * 700
    pieces = split(text)
    assert all(0 < len(piece) <= MAX_CHARS for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_the_sample_is_spread_over_all_pieces() -> None:
    pieces = [Piece(f"{'text ' * 5}{number}", Source.TOPIC, None, False) for number in range(33)]
    assert [piece.text.split()[-1] for piece in sample_of(pieces)] == ["0", "8", "16", "24", "32"]
