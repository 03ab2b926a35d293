from models.training.detector.detector import Prediction
from models.training.detector.document import Source
from models.training.detector.evaluate import confusion, figure, figures_by, sample_of, split
from models.training.detector.pieces import MAX_CHARS, Piece

PEOPLE = Piece("Written by a person, all of it.", Source.TOPIC, None, False)
CHAT = Piece("Written by a model, all of of it.", Source.ANSWER, 0.8, False)
PREDICTIONS = [
    Prediction(PEOPLE, 0.2),
    Prediction(PEOPLE, 0.9),
    Prediction(CHAT, 0.7),
    Prediction(CHAT, 0.51),
]


def test_a_figure_counts_correct_predictions() -> None:
    assert figure(PREDICTIONS) == {"share": 0.75, "right": 3, "asked": 4}


def test_the_confusion_table_counts_every_piece_once() -> None:
    assert confusion(PREDICTIONS) == {
        "written by human": {"called human": 1, "called pydoc-chat": 1},
        "written by pydoc-chat": {"called human": 0, "called pydoc-chat": 2},
    }


def test_figures_leave_out_pieces_without_a_kind() -> None:
    kinds = figures_by(PREDICTIONS, lambda it: None if it.temperature is None else "0.8")
    assert kinds == {"0.8": {"share": 1.0, "right": 2, "asked": 2}}


def test_a_long_text_is_split_without_losing_a_word() -> None:
    text = "A sentence of some words. " * 60 + "x" * 700
    pieces = split(text)
    assert all(0 < len(piece) <= MAX_CHARS for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_the_sample_is_spread_over_all_pieces() -> None:
    pieces = [Piece(f"{'text ' * 5}{number}", Source.TOPIC, None, False) for number in range(33)]
    assert [piece.text.split()[-1] for piece in sample_of(pieces)] == ["0", "8", "16", "24", "32"]
