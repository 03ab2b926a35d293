import pytest
import yaml

from serve_app.strict_yaml import UniqueKeyLoader, in_words, line_of

MISTAKES = [
    (
        "models:\n  - id: a\n    b: 1\n   - id: chat\n",
        "4: it does not continue the list that begins in line 2, column 3: check how far it is "
        "indented",
    ),
    (
        "a:\n  b: 1\n c: 2\n",
        "3: it does not continue the section that begins in line 1, column 1: check how far it is "
        "indented",
    ),
    ("a:\n\tb: 1\n", "2: a tab can't indent it: write spaces"),
    ("a: 1\nb: 1\na: 2\n", "3: key 'a' appears twice"),
    ("a: 1\nb\nc: 2\n", "2: it has no ':' after its key"),
    ("a: 'x\nb: 1\n", "1: the quote that begins here has no end"),
    ("a: [\n\n", "3: a bracket has no end"),
    ("[a]\nb = 1\n", "2: it does not continue what stands above: write KEY: VALUE"),
    ("a: [1\nb: 2\n", "2: a ',' is missing, or the bracket that begins in line 1 has no end"),
    (
        "a: 1\n  b: 2\n",
        "2: a ':' can't stand here: check how far the line is indented, or write the text in "
        "quotes",
    ),
    ("a: @x\n", "1: a value can't begin with this character: write it in quotes"),
    ("a: *x\n", "1: a value that begins with '*' needs quotes"),
    ("a: 1\n---\nb: 1\n", "2: a second document begins here: one file holds one"),
    ("a: 1\nb: \x01\n", "2: YAML can't have the character U+0001"),
    ("a: 1\nb: !x 1\n", "2: could not determine a constructor for the tag '!x'"),
]


@pytest.mark.parametrize(("text", "told"), MISTAKES)
def test_a_mistake_is_told_in_plain_words_with_its_line(text: str, told: str) -> None:
    with pytest.raises(yaml.YAMLError) as refused:
        yaml.load(text, Loader=UniqueKeyLoader)
    assert f"{line_of(text, '')}: {in_words(refused.value)}" == told
