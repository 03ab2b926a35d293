import pytest

from models.training.search.documentation import MAX_CHARS, MAX_SENTENCES, Description, Page, plain

PAGE = """
:mod:`zap` --- Zapping
======================

.. module:: zap
   :synopsis: Zap *things* at once.

Prose outside of a description is not read.

.. function:: zap(thing, /, \\
                  force=False)
              unzap(thing)

   Zap the :class:`~zap.Thing` named *thing*.  See :func:`here <zap.unzap>`. The flag zaps it
   harder. Never a fourth sentence of it.

   >>> zap('it')

   .. versionadded:: 3.3
      A note on versions is not read.

.. class:: Thing(name)

   Something to zap::

      Thing('it').zap()

   .. method:: zap()

      Zap the thing itself, at once.

.. currentmodule:: zap.more

.. exception:: ZapError

   Raised when nothing is zapped.
"""


def descriptions(source: str = PAGE) -> list[Description]:
    return Page(source).descriptions()


def test_each_description_is_read_under_its_qualified_name() -> None:
    assert [it for it in descriptions() if it.place == 0] == [
        Description("zap", "Zap things at once.", 0),
        Description("zap.zap", "Zap the Thing named thing.", 0),
        Description("zap.unzap", "Zap the Thing named thing.", 0),
        Description("zap.Thing", "Something to zap::", 0),
        Description("zap.Thing.zap", "Zap the thing itself, at once.", 0),
        Description("zap.more.ZapError", "Raised when nothing is zapped.", 0),
    ]


def test_only_the_first_sentences_are_read() -> None:
    places = [it.place for it in descriptions() if it.name == "zap.zap"]
    assert max(places) < MAX_SENTENCES
    assert not any("fourth" in it.text for it in descriptions())


def test_code_and_notes_on_versions_are_not_read() -> None:
    assert not any("'it'" in it.text or "versions" in it.text for it in descriptions())


def test_a_long_sentence_ends_after_a_word() -> None:
    (found,) = descriptions(f".. function:: f()\n\n   {'word ' * 100}end.\n")
    assert found.text.endswith("word")
    assert MAX_CHARS - len("word ") <= len(found.text) <= MAX_CHARS


@pytest.mark.parametrize(
    ("markup", "shown"),
    [
        (":func:`os.path.join`", "os.path.join"),
        (":meth:`~str.split`", "split"),
        (":class:`the class <C>`", "the class"),
        ("``None`` and *this* and **that**", "None and this and that"),
        ("`the page <https://docs.python.org>`_", "the page"),
        ("2 * 3 and a_name", "2 * 3 and a_name"),
    ],
)
def test_markup_is_removed(markup: str, shown: str) -> None:
    assert plain(markup) == shown
