from pathlib import Path

import pytest

from loadtest.load.inputs import ImagesError, read_images


def test_images_are_uris_sorted_by_file_name(tmp_path: Path) -> None:
    for name, content in (("b.JPG", b"jpg"), ("a.png", b"png"), ("c.txt", b"no image")):
        (tmp_path / name).write_bytes(content)
    assert read_images(tmp_path) == ("data:image/png;base64,cG5n", "data:image/jpeg;base64,anBn")


def test_a_directory_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImagesError, match=r"holds no files of type \.gif"):
        read_images(tmp_path)
    with pytest.raises(ImagesError, match="is not a directory"):
        read_images(tmp_path / "nowhere")
