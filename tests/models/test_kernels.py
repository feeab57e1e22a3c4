"""The compiled library in its cache: kept whole, nobody else's, and right."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.models.kernels import build, compiler, known_answers, library_cache
from covey.models.kernels.calls import available, call, packed_size

pytestmark = pytest.mark.skipif(
    not available(torch.float32, torch.device("cpu")), reason="no C compiler on this machine"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """A cache of its own; building costs nothing here and counts in `builds`."""
    content, _ = build._find_or_compile("cc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    builds: list[int] = []
    monkeypatch.setattr(build, "compile_library", lambda *_: builds.append(1) or content)
    monkeypatch.setattr(build, "builds", builds, raising=False)
    return tmp_path / "cache" / "covey"


def compiled() -> tuple[bytes, Path]:
    return build._find_or_compile("cc")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: os.truncate(path, 65536),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "one bit": flip,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "another library": lambda path: path.write_bytes(b"\x7fELF planted"),
    "a link": link,
    "a pipe": pipe,
    "a mode that lets others write": lambda path: path.chmod(0o666),
    "no digest": lambda path: path.with_suffix(".sha256").unlink(),
    "a digest that others may write": lambda path: path.with_suffix(".sha256").chmod(0o622),
    "another digest": lambda path: flip(path.with_suffix(".sha256")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_library_is_compiled_anew_and_said(cache: Path, capfd, name: str) -> None:
    content, path = compiled()
    assert compiled() == (content, path)
    assert build.builds == [1]
    DAMAGE[name](path)
    assert compiled() == (content, path)
    assert build.builds == [1, 1]
    said = capfd.readouterr().err.splitlines()
    assert said[-2] == f"note: {path} is damaged or not ours alone; compiled anew"
    assert said[-1].startswith("note: compiling operations for this processor")
    assert compiled() == (content, path)
    assert build.builds == [1, 1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_file_is_not_loaded(cache: Path) -> None:
    content, path = compiled()
    os.chown(path, 65534, 65534)
    assert compiled() == (content, path)
    assert path.stat().st_uid == 0


def test_a_folder_that_others_may_write_to_is_not_used(cache: Path, capfd) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    _, path = compiled()
    assert path.parent == cache.parent.parent / f"covey-{os.getuid()}"
    assert f"others may write to {cache}" in capfd.readouterr().err
    path.parent.chmod(0o770)
    with pytest.raises(OSError, match="only you can write to"):
        compiled()


def test_a_mask_of_0_leaves_files_that_are_used_again(cache: Path) -> None:
    before = os.umask(0)
    try:
        _, path = compiled()
        assert path.stat().st_mode & 0o077 == 0
        compiled()
    finally:
        os.umask(before)
    assert build.builds == [1]


def test_a_full_disk_costs_only_the_cache(cache: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(library_cache, "write_private_file", full)
    assert compiled()[0] == compiled()[0]
    assert build.builds == [1, 1]


@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere the file itself is loaded")
def test_a_file_cut_while_in_use_harms_nobody(tmp_path: Path) -> None:
    content, path = build._find_or_compile("cc")
    copy = Path(shutil.copy(path, tmp_path / "kernels.so"))
    library = build._load_library(content, copy)
    os.truncate(copy, 0)
    library.packed_size_f32.restype = ctypes.c_long
    assert library.packed_size_f32(ctypes.c_long(64), ctypes.c_long(32)) > 0


def operations() -> list[str]:
    found = []

    def note(name: str, *arguments: Any, **options: Any) -> None:
        found.append(name)
        call(name, *arguments, **options)

    assert known_answers.first_incorrect(note, packed_size, torch.float32) is None
    return found


def test_every_operation_of_the_sources_has_a_known_answer() -> None:
    import re

    sources = "".join((Path(build.__file__).parent / s).read_text() for s in compiler.SOURCES)
    exported = set(re.findall(r"^void NAME\((\w+)\)", sources, flags=re.MULTILINE))
    assert len(exported) > 12
    assert set(operations()) == exported


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operation_that_goes_wrong_is_named(dtype: torch.dtype) -> None:
    for broken in operations():

        def some(name: str, *arguments: Any, broken: str = broken, **options: Any) -> None:
            if name != broken:
                call(name, *arguments, **options)

        named = known_answers.first_incorrect(some, packed_size, dtype)
        assert named == ("product" if broken == "pack_weight" else broken)
